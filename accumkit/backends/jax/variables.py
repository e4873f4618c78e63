"""The variables that keep a window on JAX from one train step to the next."""

from typing import Any

import keras
from jax import numpy as jnp

from accumkit import keras_internals
from accumkit.backends.dtypes import wide
from accumkit.backends.jax.values import Values


class Variables:
    """Sums, counts and flags of a window over several batches.

    Keras hands a train step its whole state and takes the new one back:
    `unpack` and `pack` say in which order the window's part of it stands.

    Args:
        flagged: Whether a variable may be without a gradient.
    """

    def __init__(self, flagged: bool):
        self._flagged = flagged
        self._counts: list[Any] = []
        self._denominator: Any = None
        self._flags: list[Any] = []
        # By `id` of their variable, which is kept beside, so that no freezing
        # can pair them wrongly and the id stays taken.
        self._sums: dict[int, tuple[Any, Any]] = {}

    @property
    def exist(self) -> bool:
        """Whether they have been created."""
        return bool(self._counts)

    def create(self, trained: list[Any], steps: int) -> None:
        """Creates what is missing.

        Args:
            trained: What a train step trains.
            steps: N, batches in a full window.
        """
        if not self._counts:
            names = "accumulation_steps", "window_accumulation_steps"
            self._counts = [_variable((), "int32", n, steps) for n in names]
            names = "open_batches", "open_micro_batches"
            self._counts += [_variable((), "int32", n) for n in names]
            floatx = wide(keras.config.floatx())
            self._denominator = _variable((), floatx, "denominator")
            if self._flagged:
                n = len(trained)
                self._flags = [_variable((n,), "bool", "has_gradient")]
        for variable in trained:
            if id(variable) not in self._sums:
                dtype = wide(keras.backend.standardize_dtype(variable.dtype))
                name = f"sum_{len(self._sums)}"
                total = _variable(variable.shape, dtype, name)
                self._sums[id(variable)] = variable, total

    def listed(self) -> list[Any]:
        """All of them, in the order in which they travel."""
        if not self._counts:
            return []
        sums = [total for _, total in self._sums.values()]
        return [*self._counts, self._denominator, *self._flags, *sums]

    def unpack(self, traveling: list[Any]) -> Values:
        """Takes the values of `listed` apart.

        Args:
            traveling: The values.
        """
        split = 5 + len(self._flags)
        counts, denominator = traveling[:4], traveling[4]
        flags, sums = traveling[5:split], traveling[split:]
        first = counts[3] == 0
        denominator = jnp.where(first, 0, denominator)
        return Values(sums, denominator, first, counts, flags, [])

    def pack(self, values: Values) -> list[Any]:
        """Puts together what `unpack` took apart.

        Args:
            values: The window's values.
        """
        if not values.counts:
            return []
        own = [*values.counts, values.denominator, *values.flags]
        return own + values.sums

    def places(self, trained: list[Any]) -> list[int]:
        """Where the sums of some variables stand.

        Args:
            trained: The variables.
        """
        if not self._counts:
            return list(range(len(trained)))
        places = {key: place for place, key in enumerate(self._sums)}
        return [places[id(v)] for v in trained]

    def have_flags(self) -> bool:
        """Whether a variable may be without a gradient."""
        return bool(self._flags)

    def empty(self) -> None:
        """Empties the window."""
        for variable in self._counts[2:]:
            variable.assign(0)
        # A copy: Keras donates the buffers, and none may be donated twice.
        self._counts[1].assign(jnp.array(self._counts[0].value))

    def replace_lost(self, steps: int, traveling: list[Any]) -> None:
        """Makes new values where an error in a train step took the old along.

        As loading weights does for the model's own.

        Args:
            steps: N, batches in a full window.
            traveling: What else traveled, and these.
        """
        if any(_is_lost(v) for v in traveling):
            for variable in traveling:
                variable.assign(jnp.zeros(variable.shape, variable.dtype))
            self._counts[0].assign(steps)

    def set_steps(self, steps: int) -> None:
        """Sets N from the next window on.

        Args:
            steps: N, batches in a full window.
        """
        if self._counts:
            self._counts[0].assign(steps)
            if not self.open_batches():
                self._counts[1].assign(steps)

    def open_batches(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return self._count(2)

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds; waits for the device."""
        return self._count(3)

    def _count(self, index: int) -> int:
        if not self._counts or _is_lost(self._counts[index]):
            return 0
        return int(self._counts[index].value)


def assign(variables: Any, values: Any) -> None:
    """Assigns lists of values to lists of variables.

    Args:
        variables: The lists of variables.
        values: As many lists of as many values.
    """
    for several, new in zip(variables, values, strict=True):
        for variable, value in zip(several, new, strict=True):
            variable.assign(value)


def _variable(shape: Any, dtype: str, name: str, value: int = 0) -> Any:
    return keras.Variable(
        keras.initializers.Constant(value),
        shape=tuple(shape),
        dtype=dtype,
        trainable=False,
        autocast=False,
        name=name,
    )


def _is_lost(variable: Any) -> bool:
    """Whether an error in a train step took the value with it."""
    value = keras_internals.raw_value(variable)
    deleted = getattr(value, "is_deleted", None)
    return value is None or (deleted is not None and deleted())
