"""`OptimizerRemainder`: the remainder where an optimizer accumulates."""

from typing import Any

import keras

from accumkit import checks
from accumkit.optimizer import AccumulationOptimizer


class OptimizerRemainder(keras.callbacks.Callback):
    """Closes the open window of an `AccumulationOptimizer` before validation.

    For `fit` of any model that trains with one or more of them, in `compile`
    or in attributes of the model. It must stand first in the list: callbacks
    that save, compare or stop must see the weights with the remainder in
    them.

    Example:

    ```python
    plain = keras.Sequential([keras.layers.Dense(1)])
    plain.compile(accumkit.AccumulationOptimizer("adam", 8), "mse")
    remainder = accumkit.callbacks.OptimizerRemainder()
    plain.fit(x, y, batch_size=3, callbacks=[remainder])
    ```

    Args:
        remainder: What becomes of a window still open at the end of an epoch.
            `"apply"`: it makes an optimizer step. `"carry"`: the next epoch,
            or the next `fit`, goes on with it. `"drop"`: it is discarded.
            Defaults to `"apply"`.

    Raises:
        ValueError: If `remainder` is unknown; in `fit`, if the model has no
            `AccumulationOptimizer`.
    """

    def __init__(self, remainder: str = "apply"):
        super().__init__()
        checks.choice("remainder", remainder, checks.REMAINDERS)
        self.remainder = remainder
        self._in_epoch = False

    def _optimizers(self) -> list[AccumulationOptimizer]:
        # `self.model` hands back on JAX what `fit` has.
        hanging = [
            value
            for value in vars(self.model).values()
            if isinstance(value, keras.optimizers.Optimizer)
        ]
        found = {
            id(one): one
            for optimizer in hanging
            for one in checks.nested_optimizers(optimizer)
            if isinstance(one, AccumulationOptimizer)
        }
        return list(found.values())

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts with an empty window."""
        optimizers = self._optimizers()
        if not optimizers:
            raise ValueError(
                "`OptimizerRemainder` needs a model that trains with an "
                "`AccumulationOptimizer`. Received: the optimizer "
                f"{type(self.model.optimizer).__name__}. Wrap it, or leave "
                "out the callback: `AccumulationMixin` has its own."
            )
        if self.remainder != "carry":
            for optimizer in optimizers:
                optimizer.discard_accumulated_gradients()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes that an evaluation now is that of `fit`."""
        self._in_epoch = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Deals with the remainder before `fit` validates."""
        if self._in_epoch:
            self._close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Deals with the remainder of an epoch without validation."""
        self._close()
        self._in_epoch = False

    def _close(self) -> None:
        for optimizer in self._optimizers():
            if self.remainder == "apply":
                optimizer.apply_accumulated_gradients()
            elif self.remainder == "drop":
                optimizer.discard_accumulated_gradients()
