"""What happened in each window, noted on the device as it happens.

A callback that asked after each batch would wait for the device each time,
and would see only the last of several batches run in one execution. So the
train step itself writes a row when a window closes, and whoever wants to know
reads many rows at once.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

FIELDS: tuple[str, ...] = (
    "micro_batches",
    "samples",
    "loss",
    "learning_rate",
    "gradient_norm",
    "stepped",
)


class WindowRecorder:
    """A ring of rows, one for each closed window.

    Its variables hang on no layer, so they are no weights. Create it where
    the model's other variables were created (under the same strategy).

    Args:
        gradient_norm: Whether to compute the norm of each window's gradient.
        capacity: How many windows may close between two readings.
    """

    def __init__(self, gradient_norm: bool, capacity: int):
        self.gradient_norm = gradient_norm
        self.capacity = capacity
        self.dropped = 0
        # Sums over the open window: loss, its divisor, samples,
        # micro-batches.
        self.sums = keras.Variable(
            "zeros",
            shape=(4,),
            dtype=keras.config.floatx(),
            trainable=False,
            autocast=False,
            synchronization="on_read",
            aggregation="sum",
            name="window_sums",
        )
        self.rows = keras.Variable(
            "zeros",
            shape=(capacity, len(FIELDS)),
            dtype=keras.config.floatx(),
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name="window_rows",
        )
        self.cursor = keras.Variable(
            0,
            dtype="int32",
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name="window_cursor",
        )

    @property
    def variables(self) -> list[Any]:
        """The recorder's variables."""
        return [self.sums, self.rows, self.cursor]

    def add(
        self,
        contribution: Any,
        divisor: Any,
        samples: Any,
        micro_batches: float = 1.0,
    ) -> None:
        """Notes a micro-batch; runs inside the train step.

        Args:
            contribution: Its loss as it enters the window's, a scalar.
            divisor: Its share of what their sum is divided by; None where
                nothing is divided.
            samples: Its number of samples.
            micro_batches: 1, or a replica's share of it.
        """
        dtype = self.sums.dtype
        parts = (
            ops.cast(contribution, dtype),
            ops.cast(0 if divisor is None else divisor, dtype),
            ops.cast(samples, dtype),
            ops.cast(micro_batches, dtype),
        )
        self.sums.assign_add(ops.stack(parts))

    def close(self, rate: Any, norm: Any, stepped: Any) -> None:
        """Writes the row of the window that has closed; in the train step.

        Args:
            rate: The learning rate that the step used.
            norm: The norm of its gradient.
            stepped: 1 if the optimizer took the step, 0 if it skipped it.
        """
        dtype = self.rows.dtype
        # A tensor: a variable with components is summed by being read.
        sums = ops.convert_to_tensor(self.sums.value)
        loss = sums[0] / ops.where(
            sums[1] == 0, ops.ones_like(sums[1]), sums[1]
        )
        parts = (sums[3], sums[2], loss, rate, norm, stepped)
        row = ops.stack([ops.cast(p, dtype) for p in parts])
        at = ops.arange(self.capacity, dtype="int32")
        here = ops.equal(at, self.cursor.value % self.capacity)
        self.rows.assign(ops.where(here[:, None], row[None], self.rows.value))
        self.cursor.assign(self.cursor.value + 1)
        self.sums.assign(ops.zeros((4,), dtype))

    def discard(self) -> None:
        """Forgets the open window, but counts its micro-batches."""
        self.dropped += round(float(_host(self.sums)[3]))
        self.sums.assign(np.zeros(4, self.sums.dtype))


class WindowReader:
    """One who reads a recorder's rows, each once; there may be several.

    Args:
        recorder: The recorder. What it has noted so far is not read.
    """

    def __init__(self, recorder: WindowRecorder):
        self.recorder = recorder
        self._taken = int(_host(recorder.cursor))
        self._dropped = recorder.dropped

    def take(self) -> tuple[list[dict[str, float]], int]:
        """Returns the rows written since the last call; waits for the device.

        Returns:
            The rows, oldest first, and the number of micro-batches that were
            discarded after them.
        """
        recorder = self.recorder
        end = int(_host(recorder.cursor))
        rows = _host(recorder.rows)
        taken = [
            dict(zip(FIELDS, rows[i % recorder.capacity].tolist(), strict=True))
            for i in range(max(self._taken, end - recorder.capacity), end)
        ]
        dropped = recorder.dropped - self._dropped
        self._taken, self._dropped = end, recorder.dropped
        return taken, dropped


def _host(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy())


def gradient_norm(gradients: list[Any], scale: Any) -> Any:
    """The norm of all gradients together, without the loss scale.

    Args:
        gradients: Tensors; None where there is none.
        scale: By what the loss was multiplied (`LossScaleOptimizer`).

    Returns:
        A scalar, √Σ g² / scale.
    """
    squares = [
        ops.sum(ops.square(ops.cast(g, "float32")))
        for g in gradients
        if g is not None
    ]
    total = ops.sqrt(ops.sum(ops.stack(squares))) if squares else 0.0
    return total / ops.cast(scale, "float32")
