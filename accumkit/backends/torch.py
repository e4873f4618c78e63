"""Accumulation on torch: autograd's own `.grad` is the accumulator.

A loss is multiplied by its weight, `backward` adds to `.grad`, and what it
holds is divided once. No second buffer, no synchronization with the device:
counts are Python numbers, and a weight that is a tensor stays one. Only where
16 bits would round the sum away are there accumulators in float32.
"""

from typing import Any, cast

import keras
import torch

from accumkit import keras_internals, observation, recording, weighting
from accumkit.backends import torch_pieces as pieces
from accumkit.window_state import WindowState


def check_options(options: dict[str, Any]) -> None:
    """Raises for arguments of `compile` that do not go with accumulation.

    Args:
        options: The arguments of `keras.Model.compile`.

    Raises:
        ValueError: If the model is to be compiled with `torch.compile`.
    """
    if options.get("jit_compile") is True:
        raise ValueError(
            "`jit_compile=True` does not go with gradient accumulation on the "
            "torch backend: `torch.compile` would compile anew for every "
            "micro-batch of a window. Received: jit_compile=True. Leave it "
            "out, or compile layers of the model with `torch.compile`."
        )


def create_variables(model: Any, state: WindowState) -> None:
    """Sets up the counts of the window.

    Args:
        model: A built model.
        state: Its window.
    """
    if state.accumulation_steps > 1 and state.steps is None:
        state.steps = _Count(state.accumulation_steps)
        state.open_batches, state.open_pieces = _Count(0), _Count(0)
        state.window_steps = _Count(state.accumulation_steps)
    if state.denominator is None:
        state.denominator = 0.0
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if state.recording is not None and state.recorder is None:
        state.recorder = recording.WindowRecorder(*state.recording)


class _Count:
    """A Python number with the interface of a variable."""

    def __init__(self, value: int):
        self.value = value

    def __int__(self) -> int:
        return self.value

    def assign(self, value: int) -> None:
        self.value = value


def traveling_variables(state: WindowState) -> list[Any]:
    """None: on torch a train step reaches its variables by itself."""
    return []


def train_step(model: Any, data: Any) -> dict[str, Any]:
    """Runs one batch; takes an optimizer step where it fills the window.

    Args:
        model: The model.
        data: A batch, `(x, y, sample_weight)` or a part of that.

    Returns:
        The logs, a dict of metric results.
    """
    state = model._accumulation
    batch = keras.utils.unpack_x_y_sample_weight(data)
    create_variables(model, state)
    # Found by a walk through all layers: once a batch is enough.
    trainable = model.trainable_variables
    samples = observation.batch_size(batch[0])
    if not state.across or state.open_pieces.value == 0:
        # Whatever the user or an interrupted run left in there.
        _empty(model, state)
    if state.micro_batch_size is None:
        count = 1
        loss, _, y_pred = _micro_batch(model, state, trainable, batch)
    else:
        loss, denominator, count, batch = _all_but_last_piece(
            model, state, trainable, batch
        )
        last, weight, y_pred = _micro_batch(
            model, state, trainable, batch, count - 1
        )
        loss = loss + weight.value * last
        if weight.divides:
            loss = loss / _nonzero(denominator + weight.value)
    keras_internals.loss_tracker(model).update_state(
        loss, sample_weight=samples
    )
    x, y, sample_weight = batch
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    _close_full_window(model, state, count)
    return logs


def _all_but_last_piece(
    model: Any, state: WindowState, trainable: list[Any], batch: Any
) -> tuple[Any, Any, int, Any]:
    """Works off all pieces of a batch but the last, which may be smaller.

    Returns:
        Σ D_i·L_i and Σ D_i of those pieces, the number of all pieces, and the
        last one.
    """
    *full, last = pieces.cut(batch, cast(int, state.micro_batch_size))
    loss = denominator = 0.0
    for index, piece in enumerate(full):
        value, weight, y_pred = _micro_batch(
            model, state, trainable, piece, index
        )
        keras_internals.update_metrics(model, piece, y_pred)
        loss = loss + weight.value * value
        denominator = denominator + weight.value
    return loss, denominator, len(full) + 1, last


def _micro_batch(
    model: Any,
    state: WindowState,
    trainable: list[Any],
    batch: Any,
    index: int = 0,
) -> tuple[Any, weighting.Weight, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Returns:
        Its loss, its weight and its predictions.
    """
    x = batch[0]
    y_pred = keras_internals.forward(model, x)
    loss, weight = weighting.loss_and_weight(model, state, batch, y_pred)
    state.divides = weight.divides and not state.whole
    first = index == 0 and (not state.across or state.open_pieces.value == 0)
    scaled = weighting.window_loss(model, loss, weight, first)
    late = None
    if state.divides:
        if weighting.weights_late(model, state):
            late = weight.value
        else:
            scaled = scaled * weight.value
        state.denominator = state.denominator + weight.value
    scaled = model.optimizer.scale_loss(scaled)
    if trainable:
        scaled.backward()
        _accumulate(state, trainable, late)
    loss = loss.detach()
    if state.recorder is not None:
        state.means = weight.divides
        samples = observation.batch_size(x)
        with torch.no_grad():
            state.recorder.add(loss, weight.value, samples)
    return loss, weight, y_pred


@torch.no_grad()
def _accumulate(state: WindowState, trainable: list[Any], factor: Any) -> None:
    """Moves to float32 what must not stay in `.grad`."""
    for variable in trainable:
        gradient = variable.value.grad
        narrow = variable.dtype in ("float16", "bfloat16")
        if gradient is None or (factor is None and not narrow):
            continue
        dtype = torch.float32 if narrow else gradient.dtype
        gradient = gradient.to(dtype)
        if factor is not None:
            gradient = gradient * factor
        if id(variable) in state.accumulators:
            state.accumulators[id(variable)][1].add_(gradient)
        else:
            state.accumulators[id(variable)] = (variable, gradient)
        variable.value.grad = None


def _close_full_window(model: Any, state: WindowState, count: int) -> None:
    """Counts the batch; takes the optimizer step if the window is full."""
    if not state.across:
        _apply(model, state)
        return
    state.open_batches.value += 1
    state.open_pieces.value += count
    if state.open_batches.value >= state.window_steps.value:
        _apply(model, state)


@torch.no_grad()
def _apply(model: Any, state: WindowState) -> None:
    """Hands the window's mean gradients to the optimizer, once."""
    variables = model.trainable_variables
    if variables:
        gradients = [
            state.accumulators[id(v)][1]
            if id(v) in state.accumulators
            else v.value.grad
            for v in variables
        ]
        if state.divides:
            divisor = _nonzero(state.denominator)
            present = [g for g in gradients if g is not None]
            if present:
                torch._foreach_div_(present, divisor)  # pyright: ignore
        optimizer = model.optimizer
        if state.recorder is None:
            optimizer.apply(gradients, variables)
        else:
            rate = keras.ops.copy(optimizer.learning_rate)
            before = keras.ops.copy(optimizer.iterations)
            norm = 0.0
            if state.recorder.gradient_norm:
                scale = optimizer.scale_loss(torch.ones(()))
                norm = recording.gradient_norm(gradients, scale)
            optimizer.apply(gradients, variables)
            stepped = optimizer.iterations - before
            state.recorder.close(state.means, rate, norm, stepped)
    _empty(model, state)


def _nonzero(denominator: Any) -> Any:
    # Without weight there is no gradient either: 0 / 1 is 0.
    if isinstance(denominator, torch.Tensor):
        return torch.where(denominator == 0, 1, denominator)
    return denominator or 1.0


def _empty(model: Any, state: WindowState) -> None:
    for variable in model.trainable_variables:
        variable.value.grad = None
    state.accumulators.clear()
    state.denominator = 0.0
    if state.across:
        state.open_batches.value = state.open_pieces.value = 0
        state.window_steps.value = state.steps.value


def apply_window(model: Any, state: WindowState) -> None:
    """Takes the optimizer step of the open window, outside `fit`'s step."""
    _apply(model, state)


def discard_window(model: Any, state: WindowState) -> None:
    """Empties the window."""
    _empty(model, state)


def sync(model: Any) -> None:
    """Nothing to do: variables are always readable."""
