"""A window of gradients on torch, under any train step.

The gradients are the caller's, who may clear or add to them between
micro-batches; so the window has its own, from its first micro-batch to its
optimizer step.
"""

from typing import Any

import torch

from accumkit.backends import torch as window
from accumkit.backends.optimizers import Trained
from accumkit.window_state import WindowState


def create_variables(
    optimizer: Any, trained: Trained, state: WindowState
) -> None:
    """Builds the wrapped optimizer and the counts of the window."""
    window.create_variables(trained, state)


def replica_id() -> int:
    """The replica that the calling code works for; there is only one."""
    return 0


def is_traced() -> bool:
    """Whether the calling code is traced rather than run."""
    return False


@torch.no_grad()
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
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    totals, added = [], []
    for variable, gradient in zip(
        trained.trainable_variables, gradients, strict=True
    ):
        if gradient is None:
            continue
        narrow = gradient.dtype in (torch.float16, torch.bfloat16)
        wide = gradient.to(torch.float32) if narrow else gradient
        if weight is not None:
            wide = wide * weight
        if id(variable) in state.accumulators:
            totals.append(state.accumulators[id(variable)][1])
            added.append(wide)
        else:
            own = wide.clone() if wide is gradient else wide
            state.accumulators[id(variable)] = (variable, own)
    if totals:
        torch._foreach_add_(totals, added)  # pyright: ignore
    state.denominator = state.denominator + (1 if weight is None else weight)
    state.open_batches.value += 1
    state.open_pieces.value += 1
    if state.open_batches.value >= state.window_steps.value:
        apply_window(trained, state)


def stateless_apply(
    trained: Trained,
    state: WindowState,
    gradients: list[Any],
    weight: Any,
    optimizer_values: list[Any],
    trainable_values: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Raises: the window lies in tensors that are changed in place."""
    raise ValueError(
        "`stateless_apply` is not supported with the torch backend. Received: "
        "an AccumulationOptimizer. Call `apply`."
    )


@torch.no_grad()
def apply_window(trained: Trained, state: WindowState) -> None:
    """Takes the optimizer step of the open window."""
    present = [gradient for _, gradient in state.accumulators.values()]
    torch._foreach_div_(present, window._nonzero(state.denominator))  # pyright: ignore
    gradients = [
        state.accumulators.get(id(v), (v, None))[1]
        for v in trained.trainable_variables
    ]
    trained.optimizer.apply(gradients, trained.trainable_variables)
    discard_window(trained, state)


def discard_window(trained: Trained, state: WindowState) -> None:
    """Empties the window."""
    state.accumulators.clear()
    state.denominator = 0.0
    state.open_batches.value = state.open_pieces.value = 0
    state.window_steps.value = state.steps.value
