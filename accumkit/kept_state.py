"""Running a model forward without a trace of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras import ops

from accumkit import keras_internals


class Snapshot:
    """What forward passes change, as it is now, to be put back.

    That is all variables that are not trained (moving averages, the states of
    seed generators, also of Keras's global one), the metrics' variables, and
    the randomness that Keras takes from the framework.

    Args:
        model: A built model.
        randomness: `randomness.py` of the backend.
        others: Variables beside those of the model.
    """

    def __init__(self, model: Any, randomness: Any, others: Any = ()):
        self._variables = [
            *model.non_trainable_variables,
            *model.metrics_variables,
            *others,
            *keras_internals.global_seed_states(),
        ]
        # Copies: on torch a variable is changed in place.
        self._values = [ops.copy(v) for v in self._variables]
        self._generators = randomness
        self._randomness = randomness.state()

    def put_back(self) -> None:
        """Gives everything the value that it had; again, if need be."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        self._generators.put_back(self._randomness)


@contextlib.contextmanager
def kept(model: Any, randomness: Any) -> Iterator[None]:
    """Puts back what forward passes change, also after an exception.

    Args:
        model: A built model.
        randomness: `randomness.py` of the backend.
    """
    before = Snapshot(model, randomness)
    try:
        yield
    finally:
        before.put_back()
