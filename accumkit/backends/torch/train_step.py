"""Keras's train step on torch, with accumulation."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import torch

from accumkit import (
    joined_outputs,
    keras_internals,
    observation,
    weighting,
)
from accumkit.accumulation import Accumulation
from accumkit.backends.torch import pieces, two_passes
from accumkit.backends.torch.window import Window

# Models with the hook below. A copy has it, too, and gets another: no harm.
_hooked: Any = weakref.WeakSet()


def _loaded(model: Any, _: Any) -> None:
    # What is open belongs to other weights.
    model.discard_accumulated_gradients()


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


def bypassed_methods() -> tuple[str, ...]:
    """None: what Keras's train step calls on a model, ours calls as well."""
    return ()


@contextlib.contextmanager
def making_train_function(model: Any) -> Iterator[None]:
    """Nothing to prepare: nothing is traced."""
    yield


def prepare(model: Any, accumulation: Accumulation) -> Window:
    """Creates the window, if it is missing.

    Args:
        model: A built model.
        accumulation: Its options.

    Returns:
        The window.
    """
    window = accumulation.window
    if window is None:
        window = accumulation.window = Window(
            model.optimizer, accumulation.accumulation_steps
        )
        if model not in _hooked:
            _hooked.add(model)
            model.register_load_state_dict_post_hook(_loaded)
    # As Keras's train step here; on JAX it trains `trainable_variables`. Found
    # by a walk through all layers: once a batch is enough.
    window.track(model.trainable_weights)
    if accumulation.lacks:
        # Or it is made in the first pass, unknown to what is put back.
        keras_internals.global_seed()
        accumulation.create()
    return window


def train_step(model: Any, data: Any) -> dict[str, Any]:
    """Runs one batch; takes an optimizer step where it fills the window.

    Args:
        model: The model.
        data: A batch, `(x, y, sample_weight)` or a part of that.

    Returns:
        The logs, a dict of metric results.
    """
    accumulation = model._accumulation
    batch = keras.utils.unpack_x_y_sample_weight(data)
    keras_internals.build(model, *batch)
    window = prepare(model, accumulation)
    samples = observation.batch_size(batch[0])
    if window.is_empty():
        window.clear_grad()
    if accumulation.is_one_piece(samples):
        count = 1
        part, y_pred = _micro_batch(model, accumulation, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    elif accumulation.over_batch:
        part, y_pred, count = two_passes.run(model, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    else:
        full, last, count = pieces.cut(batch, accumulation.micro_batch_size)

        def body(sums: Any, piece: Any, index: int) -> Any:
            part, y_pred = _micro_batch(
                model, accumulation, piece, samples, index
            )
            rows = observation.batch_size(piece[0])
            if joined_outputs.are_kept(model, rows, y_pred):
                return _summed(sums, part), y_pred
            keras_internals.update_metrics(model, piece, y_pred)
            return _summed(sums, part), None

        sums, kept = pieces.loop(body, (0.0, None), full)
        part, y_pred = _micro_batch(
            model, accumulation, last, samples, count - 1
        )
        if kept:
            y_pred = pieces.joined([*kept, y_pred])
        else:
            batch = last
        loss = _mean(*_summed(sums, part))
    keras_internals.loss_tracker(model).update_state(
        loss, sample_weight=samples
    )
    x, y, sample_weight = batch
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    window.close_full(count)
    return logs


def sync(model: Any) -> None:
    """Nothing to do: variables are always readable."""


def _micro_batch(
    model: Any,
    accumulation: Accumulation,
    batch: Any,
    samples: int,
    index: int = 0,
) -> tuple[weighting.MicroBatch, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Returns:
        Its loss as it enters the window, and its predictions.
    """
    x = batch[0]
    window = accumulation.window
    first = index == 0 and window.is_empty()
    with accumulation.forward(first):
        y_pred = keras_internals.forward(model, x)
    part = weighting.weigh(model, accumulation, batch, y_pred, first, samples)
    if window.variables:
        part.objective.backward()
        window.add_grad(part.late, part.divisor)
    part.objective = None  # and with it its graph
    part.contribution = part.contribution.detach()
    if window.recorder is not None:
        with torch.no_grad():
            window.recorder.add(
                part.contribution, part.divisor, observation.batch_size(x)
            )
    return part, y_pred


def _summed(sums: Any, part: weighting.MicroBatch) -> tuple[Any, Any]:
    loss, divisor = sums
    if part.divisor is not None:
        divisor = part.divisor if divisor is None else divisor + part.divisor
    return loss + part.contribution, divisor


def _mean(loss: Any, divisor: Any) -> Any:
    if divisor is None:
        return loss
    # Without weight there is no loss either: 0 / 1 is 0.
    if isinstance(divisor, torch.Tensor):
        return loss / torch.where(divisor == 0, 1, divisor)
    return loss / (divisor or 1)
