"""Keras's train step on JAX, with accumulation: stateless."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import keras
from jax import numpy as jnp

from accumkit import (
    joined_outputs,
    keras_internals,
    observation,
    recording,
    weighting,
)
from accumkit.accumulation import Accumulation
from accumkit.backends.jax import pieces
from accumkit.backends.jax.window import Window


def check_options(options: dict[str, Any]) -> None:
    """Nothing to refuse: all arguments of `compile` work."""


def bypassed_methods() -> tuple[str, ...]:
    """Methods of a model that only Keras's train step calls."""
    return (
        "compute_loss_and_updates",
        "stateless_call",
        "stateless_compute_loss",
    )


@contextlib.contextmanager
def making_train_function(model: Any) -> Iterator[None]:
    """Has Keras compile a train step that no other is equal to.

    `jax.jit` finds the trace of an equal function, and two bound methods of
    one model are equal: whoever holds on to an old train function would have
    a model that was compiled again train with its old loss.

    Args:
        model: The model, whose `make_train_function` runs in the block.
    """
    own = vars(model)
    # A function that somebody put on the object.
    before = {k: v for k, v in own.items() if k == "train_step"}
    own["train_step"] = functools.partial(model.train_step)
    try:
        yield
    finally:
        del own["train_step"]
        own.update(before)


def prepare(model: Any, accumulation: Accumulation) -> Window:
    """Creates the window and its variables, as far as they are missing.

    Args:
        model: A built model.
        accumulation: Its options.

    Returns:
        The window.
    """
    window = accumulation.window
    if window is None:
        window = accumulation.window = Window(
            model.optimizer, accumulation.accumulation_steps, flagged=False
        )
    window.track(model.trainable_variables)
    if accumulation.recording is not None and window.recorder is None:
        window.recorder = recording.WindowRecorder(*accumulation.recording)
    return window


def train_step(model: Any, train_state: Any, data: Any) -> tuple[Any, Any]:
    """Runs one batch; takes an optimizer step where it fills the window.

    Args:
        model: The model.
        train_state: Trainable, non-trainable, optimizer and metrics variables.
        data: A batch, `(x, y, sample_weight)` or a part of that.

    Returns:
        The logs, and the new state.
    """
    accumulation = model._accumulation
    batch = keras.utils.unpack_x_y_sample_weight(data)
    samples = observation.batch_size(batch[0])
    trainable, others, optimizer, metrics = train_state
    window = accumulation.window or prepare(model, accumulation)
    split = len(others) - len(window.traveling_variables)
    values = window.values(others[split:], trainable)
    fixed = trainable, optimizer
    state = (others[:split], metrics, values)
    y_pred = None
    if accumulation.micro_batch_size is None:
        count = 1
        state, part, y_pred = _micro_batch(model, fixed, state, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    else:
        own = keras_internals.overrides_compute_metrics(model)
        full, last, count = pieces.cut(
            batch, accumulation.micro_batch_size, own
        )
        zero = jnp.zeros((), values.denominator.dtype)

        def body(carry: Any, piece: Any) -> Any:
            state, *sums = carry
            state, part, y_pred = _micro_batch(
                model, fixed, state, piece, samples
            )
            if full.in_order and joined_outputs.are_kept(
                model, full.size, y_pred
            ):
                return (state, *_summed(sums, part)), y_pred
            state = _update_metrics(model, state, piece, y_pred)
            return (state, *_summed(sums, part)), None

        carry, kept = pieces.loop(body, (state, zero, zero), full)
        (state, *sums), rest = last(carry)
        if rest is not None:
            state, part, y_pred = _micro_batch(
                model, fixed, state, rest, samples
            )
            sums = _summed(sums, part)
        if kept is None:
            batch = rest
        else:
            y_pred = kept if rest is None else pieces.joined([kept, y_pred])
        loss = _mean(*sums)
    state, logs = _logs(model, state, batch, y_pred, loss, samples)
    others, metrics, values = state
    values, trainable, optimizer = window.close_full(
        values, trainable, optimizer, count
    )
    others = [*others, *window.traveling(values)]
    return logs, (trainable, others, optimizer, metrics)


def sync(model: Any) -> None:
    """Makes the model's variables readable in the middle of `fit`."""
    model.jax_state_sync()


@contextlib.contextmanager
def keeping_randomness() -> Iterator[None]:
    """Nothing to keep: Keras draws from states that are variables."""
    yield


def _micro_batch(
    model: Any, fixed: Any, state: Any, batch: Any, samples: Any
) -> tuple[Any, weighting.MicroBatch, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Args:
        model: The model.
        fixed: Values of the trainable and of the optimizer's variables.
        state: Values of the other variables, the metrics, and the window.
        batch: The micro-batch.
        samples: Samples of the whole batch.

    Returns:
        The new state, the loss as it enters the window, and the predictions.
    """
    accumulation = model._accumulation
    window = accumulation.window
    trainable, optimizer = fixed
    others, metrics, values = state
    x = batch[0]

    def objective(trainable: Any) -> tuple[Any, Any]:
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(model.non_trainable_variables, others, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
            *zip(model.optimizer.variables, optimizer, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            y_pred = keras_internals.forward(model, x)
            # The mask on a prediction does not outlive this function.
            part = weighting.weigh(
                model, accumulation, batch, y_pred, values.first, samples
            )
        updates = (
            [scope.get_current_value(v) for v in model.non_trainable_variables],
            [scope.get_current_value(v) for v in model.metrics_variables],
        )
        rest = part.contribution, part.divisor, part.late
        return part.objective, (rest, y_pred, updates)

    gradients, (rest, y_pred, updates) = jax.grad(objective, has_aux=True)(
        trainable
    )
    part = weighting.MicroBatch(None, *rest)
    values = window.add(values, gradients, part.late, part.divisor)
    values = window.note(
        values, part.contribution, part.divisor, observation.batch_size(x)
    )
    return (*updates, values), part, y_pred


def _summed(sums: Any, part: weighting.MicroBatch) -> list[Any]:
    loss, divisor = sums
    loss = loss + part.contribution.astype(loss.dtype)
    if part.divisor is not None:
        divisor = divisor + jnp.asarray(part.divisor, divisor.dtype)
    return [loss, divisor]


def _mean(loss: Any, divisor: Any) -> Any:
    if divisor is None:
        return loss
    # What was not divided has no divisor.
    return loss / jnp.where(divisor == 0, 1, divisor).astype(loss.dtype)


def _update_metrics(model: Any, state: Any, batch: Any, y_pred: Any) -> Any:
    others, metrics, values = state
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(mapping) as scope:
        keras_internals.update_metrics(model, batch, y_pred)
    metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    return others, metrics, values


def _logs(
    model: Any, state: Any, batch: Any, y_pred: Any, loss: Any, samples: Any
) -> tuple[Any, Any]:
    """Updates the metrics with what they have not seen yet, if anything."""
    others, metrics, values = state
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(mapping) as scope:
        keras_internals.loss_tracker(model).update_state(
            loss, sample_weight=samples
        )
        if batch is None:
            logs = model.get_metrics_result()
        else:
            x, y, sample_weight = batch
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
    metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    return (others, metrics, values), logs
