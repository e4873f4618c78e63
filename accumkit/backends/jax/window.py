"""A window of gradients on JAX: values that travel, and pure functions.

Keras hands a train step its whole state and takes the new one back. `Values`
are the window's part of it, `Variables` keep them in between. `lax.cond` skips
the optimizer's work inside a window, so that it costs nothing there.
"""

import contextlib
from typing import Any

import jax
from jax import numpy as jnp

from accumkit.backends.jax import optimizing
from accumkit.backends.jax.values import Values, like, of_one_step
from accumkit.backends.jax.variables import Variables, assign


def replica_id() -> int:
    """The replica that the calling code works for; there is only one."""
    return 0


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
        self._own = Variables(flagged)
        self._compiled: Any = None

    def track(self, variables: list[Any]) -> None:
        """Creates what is missing for the variables of a train step.

        Args:
            variables: What the train step trains.
        """
        self.variables = list(variables)
        if self.across:
            self._own.create(self.variables, self._n)
        if not self.optimizer.built:
            self.optimizer.build(self.variables)

    @property
    def traveling_variables(self) -> list[Any]:
        """Variables whose values Keras must hand through the train step."""
        travels = self._own.listed()
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
        exist = self._own.exist
        values = self._own.unpack(rest) if exist else of_one_step(trainable)
        return values._replace(records=records)

    def traveling(self, values: Values) -> list[Any]:
        """Puts together what `values` took apart."""
        return [*self._own.pack(values), *values.records]

    def add(
        self, values: Values, gradients: list[Any], late: Any, divisor: Any
    ) -> Values:
        """Adds the gradients of a micro-batch; see `Values.added`."""
        places = self._own.places(self.variables)
        return values.added(places, gradients, late, divisor)

    def note(
        self, values: Values, contribution: Any, divisor: Any, *counts: Any
    ) -> Values:
        """Has the recorder, if there is one, `add` a loss and its samples."""
        if self.recorder is None:
            return values
        given = values.records, "add", contribution, divisor, *counts
        records = optimizing.record(self.recorder, *given)
        return values._replace(records=records)

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
        full = values.is_full()

        def step() -> Any:
            return like(before, self._apply(values, *before))

        if optimizing.is_traced(full):
            after = jax.lax.cond(full, step, lambda: before)
        else:  # A `cond` would be compiled for every batch.
            after = step() if full else before
        trainable, optimizer, records = after
        values = values._replace(records=records)
        return values.counted(full, pieces), trainable, optimizer

    def take(self, gradients: list[Any], weight: Any = None) -> None:
        """Adds a micro-batch and closes the window if that fills it.

        `weight` is what it weighs, None for 1.
        """
        optimizer = [*self.optimizer.variables, *self.traveling_variables]
        new = self.stateless_take(
            gradients,
            weight,
            [v.value for v in optimizer],
            [v.value for v in self.variables],
        )
        assign((self.variables, optimizer), new)

    def stateless_take(
        self,
        gradients: list[Any],
        weight: Any,
        optimizer: list[Any],
        trainable: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """As `take`, on values that are handed in and back.

        `optimizer` are those of the optimizer's variables and the window's.
        """
        # `LossScaleOptimizer` hands in variables.
        optimizer = [jnp.asarray(getattr(v, "value", v)) for v in optimizer]
        split = len(self.optimizer.variables)
        inner, own = optimizer[:split], optimizer[split:]
        given = 1 if weight is None else jax.lax.stop_gradient(weight)
        # Outside a trace a `cond` would be compiled for every micro-batch.
        traced = optimizing.is_traced(*own, *trainable)
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
        if self._own.have_flags():
            # Read now, so that what has no gradient can be left out.
            new = step(own, *given)
        else:
            if self._compiled is None:
                self._compiled = jax.jit(step)
            new = self._compiled(own, *given)
        assign(variables, new)
        self.discard()

    def discard(self) -> None:
        """Empties the window, outside a trace."""
        if self._own.exist:
            self._own.replace_lost(self._n, self.traveling_variables)
            self._own.empty()

    def forget_traces(self) -> None:
        """Has everything compiled anew: optimizer or schedule has changed."""
        self._compiled = None

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on."""
        self._n = accumulation_steps
        self.across = self.across or accumulation_steps > 1
        self._own.set_steps(accumulation_steps)

    def open_batches(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return self._own.open_batches()

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds; waits for the device."""
        return self._own.open_micro_batches()

    def _apply(
        self, values: Values, trainable: Any, optimizer: Any, records: Any
    ) -> tuple[Any, Any, Any]:
        """Hands the window's mean gradients to the optimizer, once."""
        if not trainable:
            return trainable, optimizer, records
        gradients = values.mean(self._own.places(self.variables))
        new = optimizing.step(
            self.optimizer,
            self.variables,
            values.flags,
            gradients,
            trainable,
            optimizer,
        )
        if self.recorder is not None:
            before_after = optimizer, new[1]
            records = optimizing.record_step(
                self.recorder, records, self.optimizer, gradients, before_after
            )
        return *new, records
