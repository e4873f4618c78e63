"""Running a model forward without a trace of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras import ops

from accumkit.backends import backend


@contextlib.contextmanager
def kept(model: Any) -> Iterator[None]:
    """Puts back what forward passes change, also after an exception.

    That is all variables that are not trained (moving averages, the states of
    seed generators) and the randomness that Keras takes from the framework.

    Args:
        model: A built model.
    """
    variables = list(model.non_trainable_variables)
    # Copies: on torch a variable is changed in place.
    before = [ops.copy(v) for v in variables]
    try:
        with backend.keeping_randomness():
            yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
