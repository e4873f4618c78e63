"""A window of gradients on JAX, under any train step."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
from jax import numpy as jnp

from accumkit.backends import jax as window
from accumkit.backends.optimizers import Trained
from accumkit.window_state import WindowState


def create_variables(
    optimizer: Any, trained: Trained, state: WindowState
) -> None:
    """Builds the wrapped optimizer and the variables of the window."""
    window.create_variables(trained, state)


def replica_id() -> int:
    """The replica that the calling code works for; there is only one."""
    return 0


# pyright does not find the submodule.
_Tracer: Any = jax.core.Tracer  # pyright: ignore


def is_traced() -> bool:
    """Whether the calling code is traced rather than run."""
    return isinstance(jnp.zeros(()), _Tracer)


def apply(
    trained: Trained, state: WindowState, gradients: list[Any], weight: Any
) -> None:
    """Adds a micro-batch; takes an optimizer step in a full window.

    Args:
        trained: The wrapped optimizer and what it trains.
        state: The window.
        gradients: One for each variable, or None.
        weight: What the micro-batch weighs, None for 1.
    """
    own = window.traveling_variables(state)
    optimizer = [*own, *trained.optimizer.variables]
    trainable = trained.trainable_variables
    new = stateless_apply(
        trained,
        state,
        gradients,
        weight,
        [v.value for v in optimizer],
        [v.value for v in trainable],
    )
    for variables, values in zip((trainable, optimizer), new, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def stateless_apply(
    trained: Trained,
    state: WindowState,
    gradients: list[Any],
    weight: Any,
    optimizer_values: list[Any],
    trainable_values: list[Any],
) -> tuple[list[Any], list[Any]]:
    """As `apply`, on values that are handed in and back.

    Args:
        trained: The wrapped optimizer and what it trains.
        state: The window.
        gradients: One for each variable, or None.
        weight: What the micro-batch weighs, None for 1.
        optimizer_values: Of the window's and the wrapped optimizer's
            variables.
        trainable_values: Of the variables that are trained.

    Returns:
        The new values of the trained variables and of the others.
    """
    # `LossScaleOptimizer` hands in variables.
    values = [jnp.asarray(getattr(v, "value", v)) for v in optimizer_values]
    split = len(window.traveling_variables(state))
    own, inner = values[:split], values[split:]
    steps, size, batches, pieces, denominator, *sums = own
    first = pieces == 0
    value = jnp.asarray(1 if weight is None else weight, denominator.dtype)
    value = jax.lax.stop_gradient(value)
    now: Any = SimpleNamespace(
        trainable=list(trainable_values),
        optimizer=inner,
        records=[],
        gradients=sums,
        denominator=jnp.where(first, 0, denominator) + value,
        steps=steps,
        size=size,
        batches=batches,
        pieces=pieces,
        first=first,
    )
    filled = [jnp.zeros(()) if g is None else g for g in gradients]
    window._accumulate(now, filled, None if weight is None else value)
    # Outside a trace a `cond` would be compiled anew for every micro-batch.
    traced = isinstance(first, _Tracer)
    with contextlib.nullcontext() if traced else jax.disable_jit():
        window._close_full_window(_masked(trained, state), state, now, 1)
        if not traced and trained.run_eagerly and now.pieces == 0:
            # In a trace what got a gradient is settled; eagerly each window
            # finds out anew.
            state.touched.clear()
    return list(now.trainable), [
        now.steps,
        now.size,
        now.batches,
        now.pieces,
        now.denominator,
        *now.gradients,
        *now.optimizer,
    ]


def _masked(trained: Trained, state: WindowState) -> Any:
    """What is trained, with an optimizer for which no gradient stays None."""

    def step(optimizer: Any, gradients: Any, trainable: Any) -> Any:
        gradients = [
            gradient if id(variable) in state.touched else None
            for variable, gradient in zip(
                trained.trainable_variables, gradients, strict=True
            )
        ]
        new = trained.optimizer.stateless_apply(optimizer, gradients, trainable)
        return list(new[0]), list(new[1])

    return SimpleNamespace(
        trainable_variables=trained.trainable_variables,
        run_eagerly=False,
        train_function=(trained.train_function, frozenset(state.touched)),
        optimizer=SimpleNamespace(
            variables=trained.optimizer.variables, stateless_apply=step
        ),
    )


def apply_window(trained: Trained, state: WindowState) -> None:
    """Takes the optimizer step of the open window, outside a trace."""
    masked = _masked(trained, state)
    if state.applying is not None and state.applying[0] == (
        masked.train_function
    ):
        masked.train_function = state.applying[0]
    window.apply_window(masked, state)
    discard_window(trained, state)


def discard_window(trained: Trained, state: WindowState) -> None:
    """Empties the window, outside a trace."""
    window.discard_window(trained, state)
    if trained.run_eagerly:
        state.touched.clear()
