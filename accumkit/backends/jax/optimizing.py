"""The optimizer's step on JAX, as pure functions of values."""

from typing import Any

import jax
import keras
from jax import numpy as jnp

from accumkit import keras_internals, recording

# pyright does not find the submodule.
_Tracer: Any = jax.core.Tracer  # pyright: ignore


def is_traced(*values: Any) -> bool:
    """Whether any of the values is only known in a trace.

    Args:
        *values: JAX arrays.
    """
    return any(isinstance(value, _Tracer) for value in values)


def step(
    optimizer: Any,
    variables: list[Any],
    flags: list[Any],
    gradients: list[Any],
    trainable: list[Any],
    state: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Takes an optimizer step.

    Args:
        optimizer: The optimizer.
        variables: What is trained.
        flags: One array that says which of them have a gradient, or none
            where all have.
        gradients: One for each of them.
        trainable: Their values.
        state: Values of the optimizer's variables.

    Returns:
        The new values of both.
    """
    if not flags:
        return optimizer.stateless_apply(state, gradients, trainable)
    if not is_traced(flags[0]):
        gradients = [
            g if flag else None
            for g, flag in zip(gradients, flags[0].tolist(), strict=True)
        ]
        new = optimizer.stateless_apply(state, gradients, trainable)
        return list(new[0]), list(new[1])

    # In a trace only the flags know; zeros instead of None would let decay
    # and momentum move a variable.
    def guard(index: int, variable: Any, update: Any) -> None:
        keras_internals.update_where(
            flags[0][index], update, {id(variable): trainable[index]}
        )

    with keras_internals.guarded_updates(optimizer, variables, guard):
        new = optimizer.stateless_apply(state, gradients, trainable)
    return list(new[0]), list(new[1])


def record(recorder: Any, records: list[Any], method: str, *given: Any) -> Any:
    """Runs a method of a recorder on values.

    Args:
        recorder: A `WindowRecorder`.
        records: Values of its variables.
        method: Name of the method.
        *given: Its arguments.

    Returns:
        The new values.
    """
    mapping = list(zip(recorder.variables, records, strict=True))
    with keras.StatelessScope(mapping) as scope:
        getattr(recorder, method)(*given)
    return [scope.get_current_value(v) for v in recorder.variables]


def record_step(
    recorder: Any,
    records: list[Any],
    optimizer: Any,
    gradients: list[Any],
    states: tuple[list[Any], list[Any]],
) -> Any:
    """Has a recorder note an optimizer step.

    Args:
        recorder: A `WindowRecorder`.
        records: Values of its variables.
        optimizer: The optimizer.
        gradients: What it was given.
        states: Values of its variables before and after the step.

    Returns:
        The new values of the recorder's variables.
    """
    before, after = states
    rate, iterations, scale = _read(optimizer, before)
    stepped = _read(optimizer, after)[1] - iterations
    norm = 0.0
    if recorder.gradient_norm:
        norm = recording.gradient_norm(gradients, scale)
    return record(recorder, records, "close", rate, norm, stepped)


def _read(optimizer: Any, values: Any) -> tuple[Any, Any, Any]:
    """Learning rate, iterations and loss scale of an optimizer's state."""
    mapping = list(zip(optimizer.variables, values, strict=True))
    with keras.StatelessScope(mapping):
        return (
            keras.ops.convert_to_tensor(optimizer.learning_rate),
            keras.ops.convert_to_tensor(optimizer.iterations),
            optimizer.scale_loss(jnp.ones(())),
        )
