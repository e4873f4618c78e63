"""Moving averages of BatchNormalization, updated once a window.

The statistics of a window's micro-batches are pooled, and what a moving
average becomes is worked out anew after each of them, from what it was when
the window began: nothing has to be done when the window closes, and it is
right whenever it does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from accumkit import batch_statistics

# Calls of one layer in a forward pass, as of an encoder that two inputs share.
_MOST_CALLS = 4


class PooledStatistics:
    """Statistics of the open window, a few variables for each layer.

    They hang on no layer, so they are no weights. Create it where the model's
    other variables were created (under the same strategy).

    Args:
        layers: BatchNormalization layers by path, built.
    """

    def __init__(self, layers: dict[str, Any]):
        self.layers = dict(layers)
        self._pools = {path: _Pool(v) for path, v in layers.items()}
        self._calls: dict[str, int] = {}
        self._opens: Any = True

    @property
    def variables(self) -> list[Any]:
        """All of them, in one order."""
        return [v for pool in self._pools.values() for v in pool.variables]

    @contextlib.contextmanager
    def pooling(self, opens: Any) -> Iterator[None]:
        """Pools what goes through the layers in the block.

        Args:
            opens: Bool or scalar bool tensor, whether the forward pass in it
                is that of a micro-batch that opens a window.
        """
        self._calls, self._opens = {}, opens
        try:
            with batch_statistics.observed(self.layers, self._note):
                yield
        finally:
            self._opens = True  # No tensor of a trace outlives it.

    def _note(
        self, path: str, count: Any, mean: Any, variance: Any, before: Any
    ) -> None:
        index = self._calls.get(path, 0)
        self._calls[path] = index + 1
        if index == _MOST_CALLS:
            raise ValueError(
                "`action='pool_statistics'` keeps the statistics of "
                f"{_MOST_CALLS} calls of a layer in one forward pass. "
                f"Received: a model that calls {path!r} more often. Use "
                "`action='rescale_momentum'`."
            )
        self._pools[path].update(
            index, self._opens, (count, mean, variance), before
        )


class _Pool:
    """What was pooled of one layer, for each of its calls.

    Attributes:
        variables: The average before the window (mean, variance), and for
            each call the number of values, their mean and their variance.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        shape = tuple(layer.moving_mean.shape)
        shapes = [shape, shape, *[(), shape, shape] * _MOST_CALLS]
        self.variables = [
            keras.Variable(
                "zeros",
                shape=each,
                dtype="float32",
                trainable=False,
                autocast=False,
                synchronization="on_read",
                aggregation="mean",
                name="pooled_statistics",
            )
            for each in shapes
        ]

    def update(
        self, index: int, opens: Any, new: tuple[Any, Any, Any], before: Any
    ) -> None:
        """Pools the statistics of one call; sets the moving averages.

        Args:
            index: Which call of the forward pass it is.
            opens: Whether the micro-batch opens a window.
            new: Number of values, mean and variance.
            before: The moving averages before the call, mean and variance.
        """
        own = self.variables[2 + 3 * index : 5 + 3 * index]
        n, mean, variance = (ops.convert_to_tensor(v.value) for v in own)
        count, mean_i, variance_i = (ops.cast(v, "float32") for v in new)
        # Empty also where training begins in the middle of a window.
        empty = ops.logical_or(opens, ops.equal(n, 0))
        if index == 0:  # A later call goes on from what this one leaves.
            old = []
            for v, value in zip(self.variables[:2], before, strict=True):
                kept = ops.convert_to_tensor(v.value)
                kept = ops.where(empty, ops.cast(value, "float32"), kept)
                v.assign(kept)
                old.append(kept)
            before = old
        n = ops.where(empty, 0.0, n)
        total = n + count
        share = ops.where(total > 0, count / ops.maximum(total, 1e-30), 0.0)
        apart = mean_i - ops.where(empty, 0.0, mean)
        mean = ops.where(empty, 0.0, mean) + share * apart
        variance = (1 - share) * ops.where(empty, 0.0, variance) + share * (
            variance_i + (1 - share) * ops.square(apart)
        )
        for v, value in zip(own, (total, mean, variance), strict=True):
            v.assign(value)
        layer, momentum = self.layer, self.layer.momentum
        moving = layer.moving_mean, layer.moving_variance
        for v, old, pooled in zip(
            moving, before, (mean, variance), strict=True
        ):
            updated = (
                momentum * ops.cast(old, "float32") + (1 - momentum) * pooled
            )
            updated = ops.where(total > 0, updated, ops.cast(old, "float32"))
            v.assign(ops.cast(updated, v.dtype))
