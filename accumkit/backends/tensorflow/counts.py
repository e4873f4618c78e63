"""How far a window over several batches is filled, on TensorFlow."""

from typing import Any

import keras


class Counts:
    """N, and the batches and pieces of the open window, as variables.

    N as a train step sees it is a variable, since a Python number would freeze
    in a trace; the open window has an N of its own, so that one set in the
    middle counts from the next window on. Where a window is one train step
    they are never created, and 0.
    """

    def __init__(self):
        self.exist = False
        self._steps: Any = None
        self._size: Any = None
        self._batches: Any = None
        self._pieces: Any = None

    def create(self, accumulation_steps: int) -> None:
        """Creates the variables, if they are missing.

        Args:
            accumulation_steps: N, batches in a full window.
        """
        if self.exist:
            return
        self.exist = True
        self._steps = _scalar(accumulation_steps, "accumulation_steps")
        self._size = _scalar(accumulation_steps, "window_accumulation_steps")
        self._batches = _scalar(0, "open_batches")
        self._pieces = _scalar(0, "open_micro_batches")

    def is_empty(self) -> Any:
        """Whether nothing has been added yet; a tensor."""
        return self._pieces.value == 0

    def count(self, pieces: Any) -> Any:
        """Counts a batch.

        Args:
            pieces: In how many micro-batches it was worked off.

        Returns:
            Whether the window is full now; a tensor.
        """
        self._batches.value.assign_add(1)
        self._pieces.value.assign_add(pieces)
        return self._batches.value >= self._size.value

    def empty(self) -> None:
        """Begins the next window."""
        if self.exist:
            self._batches.value.assign(0)
            self._pieces.value.assign(0)
            self._size.value.assign(self._steps.value)

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on.

        Args:
            accumulation_steps: N, batches in a full window.
        """
        if self.exist:
            self._steps.assign(accumulation_steps)
            if not self.open_batches():
                self._size.assign(accumulation_steps)

    def open_batches(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return int(self._batches.numpy()) if self.exist else 0

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds; waits for the device."""
        return int(self._pieces.numpy()) if self.exist else 0


def _scalar(value: int, name: str) -> Any:
    return keras.Variable(
        value,
        dtype="int32",
        trainable=False,
        autocast=False,
        aggregation="only_first_replica",
        name=name,
    )
