"""A window of gradients on JAX: values that travel, and pure functions.

Keras hands a train step its whole state and takes the new one back. `Values`
are the window's part of it. `lax.cond` skips the optimizer's work inside a
window, so that it costs nothing there. The first micro-batch of a window
overwrites the sums instead of adding to them, so that nothing has to be reset.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import keras
from jax import numpy as jnp

from accumkit import keras_internals, recording
from accumkit.backends.dtypes import wide

# pyright does not find the submodule.
_Tracer: Any = jax.core.Tracer  # pyright: ignore


def replica_id() -> int:
    """The replica that the calling code works for; there is only one."""
    return 0


class Values(NamedTuple):
    """What a window holds; a pytree.

    Attributes:
        sums: The sum of gradients of each variable.
        denominator: What they are to be divided by.
        first: Whether nothing has been added yet.
        counts: N, N of the open window, batches and micro-batches in it;
            empty where a window is one train step.
        flags: Which variables got a gradient; empty where all do.
        records: Values of the recorder's variables, if there is one.
    """

    sums: list[Any]
    denominator: Any
    first: Any
    counts: list[Any]
    flags: list[Any]
    records: list[Any]


class Window:
    """Sums of gradients on their way to one optimizer step.

    Args:
        optimizer: The optimizer that takes the step.
        accumulation_steps: N, batches in a full window.
        flagged: Whether a variable may be without a gradient; under
            `jax.grad` all have one. Defaults to `True`.

    Attributes:
        across: Whether a window spans several batches.
        variables: Those of the train step that was run or traced last.
        recorder: A `WindowRecorder`, or None.
    """

    def __init__(
        self, optimizer: Any, accumulation_steps: int, flagged: bool = True
    ):
        self.optimizer = optimizer
        self.across = accumulation_steps > 1
        self.variables: list[Any] = []
        self.recorder: Any = None
        self._n = accumulation_steps
        self._flagged = flagged
        self._counts: list[Any] = []
        self._denominator: Any = None
        self._flags: list[Any] = []
        # By `id` of their variable, which is kept beside, so that no freezing
        # can pair them wrongly and the id stays taken.
        self._sums: dict[int, tuple[Any, Any]] = {}
        self._compiled: Any = None

    def track(self, variables: list[Any]) -> None:
        """Creates what is missing for the variables of a train step.

        Args:
            variables: What the train step trains.
        """
        self.variables = list(variables)
        if self.across and not self._counts:
            names = "accumulation_steps", "window_accumulation_steps"
            self._counts = [_variable((), "int32", n, self._n) for n in names]
            names = "open_batches", "open_micro_batches"
            self._counts += [_variable((), "int32", n) for n in names]
            floatx = wide(keras.config.floatx())
            self._denominator = _variable((), floatx, "denominator")
            if self._flagged:
                n = len(variables)
                self._flags = [_variable((n,), "bool", "has_gradient")]
        for variable in self.variables if self.across else []:
            if id(variable) not in self._sums:
                index = len(self._sums)
                total = _variable(
                    variable.shape, _wide(variable.dtype), f"sum_{index}"
                )
                self._sums[id(variable)] = variable, total
        if not self.optimizer.built:
            self.optimizer.build(self.variables)

    @property
    def traveling_variables(self) -> list[Any]:
        """Variables whose values Keras must hand through the train step."""
        travels: list[Any] = []
        if self._counts:
            sums = [total for _, total in self._sums.values()]
            travels = [
                *self._counts,
                self._denominator,
                *self._flags,
                *sums,
            ]
        if self.recorder is not None:
            travels += self.recorder.variables
        return travels

    def values(self, traveling: list[Any], trainable: list[Any]) -> Values:
        """Takes the values of `traveling_variables` apart.

        Args:
            traveling: The values, in their order.
            trainable: Values of what is trained.
        """
        rest = list(traveling)
        records = []
        if self.recorder is not None:
            rest, records = rest[:-3], rest[-3:]
        zero = jnp.zeros((), wide(keras.config.floatx()))
        if not self._counts:
            sums = [jnp.zeros(v.shape, _wide(v.dtype)) for v in trainable]
            return Values(sums, zero, jnp.asarray(True), [], [], records)
        counts, denominator, rest = rest[:4], rest[4], rest[5:]
        flags, sums = rest[: len(self._flags)], rest[len(self._flags) :]
        first = counts[3] == 0
        denominator = jnp.where(first, zero, denominator)
        return Values(sums, denominator, first, counts, flags, records)

    def traveling(self, values: Values) -> list[Any]:
        """Puts together what `values` took apart.

        Args:
            values: The window's values.
        """
        own = []
        if values.counts:
            own = [*values.counts, values.denominator, *values.flags]
            own += values.sums
        return [*own, *values.records]

    def add(
        self, values: Values, gradients: list[Any], late: Any, divisor: Any
    ) -> Values:
        """Adds the gradients of a micro-batch.

        Args:
            values: The window's values.
            gradients: One for each of `variables`; None where there is none.
            late: What the gradients are to be multiplied by, or None.
            divisor: Its share of what the sums are divided by, or None.

        Returns:
            The new values.
        """
        sums = list(values.sums)
        for at, gradient in zip(self._places(), gradients, strict=True):
            total = sums[at]
            if gradient is None:
                sums[at] = jnp.where(values.first, 0, total)
                continue
            gradient = gradient.astype(total.dtype)
            if late is not None:
                gradient = gradient * jnp.asarray(late, total.dtype)
            # One fused pass; the first micro-batch needs no zeros.
            sums[at] = jnp.where(values.first, gradient, total + gradient)
        denominator, flags = values.denominator, values.flags
        if divisor is not None:
            denominator = denominator + jnp.asarray(divisor, denominator.dtype)
        if flags:
            got = jnp.asarray([g is not None for g in gradients])
            flags = [got | (flags[0] & ~values.first)]
        return values._replace(
            sums=sums,
            denominator=denominator,
            flags=flags,
            first=jnp.zeros_like(values.first),
        )

    def note(
        self, values: Values, contribution: Any, divisor: Any, samples: Any
    ) -> Values:
        """Notes a micro-batch's loss, if there is a recorder.

        Args:
            values: The window's values.
            contribution: As in `WindowRecorder.add`, as are the others.
            divisor: See there.
            samples: See there.

        Returns:
            The new values.
        """
        if self.recorder is None:
            return values
        arguments = contribution, divisor, samples
        return values._replace(
            records=self._recorded(values.records, "add", *arguments)
        )

    def close_full(
        self,
        values: Values,
        trainable: list[Any],
        optimizer: list[Any],
        pieces: int = 1,
    ) -> tuple[Values, list[Any], list[Any]]:
        """Counts a batch; takes the optimizer step if the window is full.

        Args:
            values: The window's values.
            trainable: Values of what is trained.
            optimizer: Values of the optimizer's variables.
            pieces: In how many micro-batches the batch was worked off.

        Returns:
            The new values of all three.
        """
        before = trainable, optimizer, values.records
        if not values.counts:
            trainable, optimizer, records = self._apply(values, *before)
            return values._replace(records=records), trainable, optimizer
        steps, size, batches, micro = values.counts
        full = batches + 1 >= size

        def step() -> Any:
            return _like(before, self._apply(values, *before))

        if isinstance(full, _Tracer):
            after = jax.lax.cond(full, step, lambda: before)
        else:  # A `cond` would be compiled for every batch.
            after = step() if full else before
        trainable, optimizer, records = after
        counts = [
            steps,
            jnp.where(full, steps, size),
            jnp.where(full, 0, batches + 1),
            jnp.where(full, 0, micro + pieces),
        ]
        values = values._replace(counts=counts, records=records)
        return values, trainable, optimizer

    def take(self, gradients: list[Any], weight: Any = None) -> None:
        """Adds a micro-batch and closes the window if that fills it.

        Args:
            gradients: One for each variable, or None.
            weight: What it weighs, None for 1.
        """
        optimizer = [*self.optimizer.variables, *self.traveling_variables]
        new = self.stateless_take(
            gradients,
            weight,
            [v.value for v in optimizer],
            [v.value for v in self.variables],
        )
        _assign((self.variables, optimizer), new)

    def stateless_take(
        self,
        gradients: list[Any],
        weight: Any,
        optimizer: list[Any],
        trainable: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """As `take`, on values that are handed in and back.

        Args:
            gradients: One for each variable, or None.
            weight: What it weighs, None for 1.
            optimizer: Values of the optimizer's variables and the window's.
            trainable: Values of what is trained.

        Returns:
            The new values of what is trained and of `optimizer`.
        """
        # `LossScaleOptimizer` hands in variables.
        optimizer = [jnp.asarray(getattr(v, "value", v)) for v in optimizer]
        split = len(self.optimizer.variables)
        inner, own = optimizer[:split], optimizer[split:]
        given = 1 if weight is None else jax.lax.stop_gradient(weight)
        # Outside a trace a `cond` would be compiled for every micro-batch.
        traced = any(isinstance(v, _Tracer) for v in [*own, *trainable])
        with contextlib.nullcontext() if traced else jax.disable_jit():
            values = self.values(own, trainable)
            late = None if weight is None else given
            values = self.add(values, gradients, late, given)
            values, trainable, inner = self.close_full(
                values, list(trainable), inner
            )
        return list(trainable), [*inner, *self.traveling(values)]

    def apply(self) -> None:
        """Takes the optimizer step of the open window, outside a trace."""

        def step(own: Any, trainable: Any, optimizer: Any) -> Any:
            values = self.values(own, trainable)
            return self._apply(values, trainable, optimizer, values.records)

        records = self.recorder.variables if self.recorder is not None else []
        variables = self.variables, self.optimizer.variables, records
        own = [v.value for v in self.traveling_variables]
        given = [[v.value for v in several] for several in variables[:2]]
        if self._flags:
            # Read now, so that what has no gradient can be left out.
            new = step(own, *given)
        else:
            if self._compiled is None:
                self._compiled = jax.jit(step)
            new = self._compiled(own, *given)
        _assign(variables, new)
        self.discard()

    def discard(self) -> None:
        """Empties the window, outside a trace.

        Where an error in a train step took the values with it, it makes new
        ones, as loading weights does for the model's own.
        """
        if not self._counts:
            return
        if any(_is_lost(v) for v in self.traveling_variables):
            for variable in self.traveling_variables:
                variable.assign(jnp.zeros(variable.shape, variable.dtype))
            self._counts[0].assign(self._n)
        for variable in self._counts[2:]:
            variable.assign(0)
        # A copy: Keras donates the buffers, and none may be donated twice.
        self._counts[1].assign(jnp.array(self._counts[0].value))

    def forget_traces(self) -> None:
        """Has everything compiled anew: optimizer or schedule has changed."""
        self._compiled = None

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on.

        Args:
            accumulation_steps: N, batches in a full window.
        """
        self._n = accumulation_steps
        self.across = self.across or accumulation_steps > 1
        if self._counts:
            self._counts[0].assign(accumulation_steps)
            if not self.open_batches():
                self._counts[1].assign(accumulation_steps)

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

    def _places(self) -> list[int]:
        """Where the sums of today's variables stand."""
        if not self._counts:
            return list(range(len(self.variables)))
        places = {key: place for place, key in enumerate(self._sums)}
        return [places[id(v)] for v in self.variables]

    def _apply(
        self, values: Values, trainable: Any, optimizer: Any, records: Any
    ) -> tuple[Any, Any, Any]:
        """Hands the window's mean gradients to the optimizer, once."""
        if not trainable:
            return trainable, optimizer, records
        gradients = [values.sums[at] for at in self._places()]
        # Without weight there is no gradient either: 0 / 1 is 0. Where XLA
        # sees that nothing was added to it, it divides nothing.
        divisor = jnp.where(values.denominator == 0, 1, values.denominator)
        gradients = [g / divisor.astype(g.dtype) for g in gradients]
        new = self._updated(values, gradients, trainable, optimizer)
        if self.recorder is not None:
            rate, before, scale = self._read(optimizer)
            stepped = self._read(new[1])[1] - before
            norm = 0.0
            if self.recorder.gradient_norm:
                norm = recording.gradient_norm(gradients, scale)
            records = self._recorded(records, "close", rate, norm, stepped)
        return *new, records

    def _updated(
        self, values: Values, gradients: Any, trainable: Any, optimizer: Any
    ) -> tuple[Any, Any]:
        step = self.optimizer.stateless_apply
        if not values.flags:
            return step(optimizer, gradients, trainable)
        flags = values.flags[0]
        if not isinstance(flags, _Tracer):
            gradients = [
                g if flag else None
                for g, flag in zip(gradients, flags.tolist(), strict=True)
            ]
            new = step(optimizer, gradients, trainable)
            return list(new[0]), list(new[1])

        # In a trace only the flags know; zeros instead of None would let
        # decay and momentum move a variable.
        def guard(index: int, variable: Any, update: Any) -> None:
            keras_internals.update_where(
                flags[index], update, {id(variable): trainable[index]}
            )

        with keras_internals.guarded_updates(
            self.optimizer, self.variables, guard
        ):
            new = step(optimizer, gradients, trainable)
        return list(new[0]), list(new[1])

    def _recorded(self, records: list[Any], method: str, *given: Any) -> Any:
        """Runs a method of the recorder on the values that travel."""
        recorder = self.recorder
        mapping = list(zip(recorder.variables, records, strict=True))
        with keras.StatelessScope(mapping) as scope:
            getattr(recorder, method)(*given)
        return [scope.get_current_value(v) for v in recorder.variables]

    def _read(self, values: Any) -> tuple[Any, Any, Any]:
        """Learning rate, iterations and loss scale of an optimizer's state."""
        optimizer = self.optimizer
        mapping = list(zip(optimizer.variables, values, strict=True))
        with keras.StatelessScope(mapping):
            return (
                keras.ops.convert_to_tensor(optimizer.learning_rate),
                keras.ops.convert_to_tensor(optimizer.iterations),
                optimizer.scale_loss(jnp.ones(())),
            )


def _variable(shape: Any, dtype: str, name: str, value: int = 0) -> Any:
    return keras.Variable(
        keras.initializers.Constant(value),
        shape=tuple(shape),
        dtype=dtype,
        trainable=False,
        autocast=False,
        name=name,
    )


def _wide(dtype: Any) -> str:
    return wide(keras.backend.standardize_dtype(dtype))


def _like(old: Any, new: Any) -> Any:
    # Both branches must return the same types, weak ones included.
    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), old, new)


def _assign(variables: Any, values: Any) -> None:
    for several, new in zip(variables, values, strict=True):
        for variable, value in zip(several, new, strict=True):
            variable.assign(value)


def _is_lost(variable: Any) -> bool:
    """Whether an error in a train step took the value with it."""
    value = keras_internals.raw_value(variable)
    deleted = getattr(value, "is_deleted", None)
    return value is None or (deleted is not None and deleted())
