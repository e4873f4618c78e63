"""Keras's train step on TensorFlow, with accumulation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from accumkit import (
    joined_outputs,
    keras_internals,
    observation,
    weighting,
)
from accumkit.accumulation import Accumulation
from accumkit.backends.tensorflow import lengths, pieces, two_passes
from accumkit.backends.tensorflow.window import Window


def check_options(options: dict[str, Any]) -> None:
    """Nothing to refuse: all arguments of `compile` work."""


def bypassed_methods() -> tuple[str, ...]:
    """None: what Keras's train step calls on a model, ours calls as well."""
    return ()


@contextlib.contextmanager
def making_train_function(model: Any) -> Iterator[None]:
    """Has what a graph finds out about a batch raise a clear error.

    Args:
        model: The model, whose `make_train_function` runs in the block.
    """
    before = model.train_function
    yield
    if model.train_function is not before:
        model.train_function = lengths.telling(model.train_function)


def prepare(model: Any, accumulation: Accumulation) -> Window:
    """Creates the window and its variables, as far as they are missing.

    Under a strategy this must run outside replica context first.

    Args:
        model: A built model.
        accumulation: Its options.

    Returns:
        The window.
    """
    window = accumulation.window
    if window is None:
        window = accumulation.window = Window(
            model.optimizer,
            accumulation.accumulation_steps,
            model.distribute_strategy,
        )
    # As Keras's train step here; on JAX it trains `trainable_variables`.
    window.track(model.trainable_weights)
    if accumulation.lacks:
        scope = contextlib.nullcontext()
        if not tf.distribute.has_strategy():
            scope = model.distribute_strategy.scope()
        with tf.init_scope(), scope:
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
    # The window's variables must exist before anything runs in a loop.
    keras_internals.build(model, *batch)
    window = prepare(model, accumulation)
    samples = observation.batch_size(batch[0])
    if accumulation.is_one_piece(samples):
        count = 1
        part, y_pred = _micro_batch(model, accumulation, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    elif accumulation.over_batch:
        part, y_pred, count = two_passes.run(model, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    else:
        full, last, count = pieces.cut(
            batch, accumulation.micro_batch_size, model.jit_compile
        )

        def keep(y_pred: Any) -> bool:
            # A replica's metrics are assigned in the middle of its train step.
            one = model.distribute_strategy.num_replicas_in_sync == 1
            rows = accumulation.micro_batch_size
            return one and joined_outputs.are_kept(model, rows, y_pred)

        def outputs(piece: Any) -> Any:
            if not keras_internals.has_metrics(model):
                return None
            y_pred = keras_internals.forward(model, piece[0])
            return y_pred if keep(y_pred) else None

        def body(carry: list[Any], piece: Any, index: Any) -> Any:
            part, y_pred = _micro_batch(
                model, accumulation, piece, samples, index
            )
            if keep(y_pred):
                return _summed(carry, part), y_pred
            keras_internals.update_metrics(model, piece, y_pred)
            return _summed(carry, part), None

        zero = tf.zeros((), keras.config.floatx())
        carry, kept = pieces.loop(body, [zero, zero], full, outputs)
        rest = last(carry)
        part, y_pred = _micro_batch(
            model, accumulation, rest, samples, count - 1
        )
        if kept is None:
            batch = rest
        else:
            y_pred = pieces.joined([kept, y_pred])
        loss, divisor = _summed(carry, part)
        loss = _mean(loss, None if part.divisor is None else divisor)
    keras_internals.loss_tracker(model).update_state(
        loss, sample_weight=samples
    )
    x, y, sample_weight = batch
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    # See `Window.close_full` on data that runs out.
    with tf.control_dependencies([loss]):
        window.close_full(count)
    return logs


def sync(model: Any) -> None:
    """Nothing to do: variables are always readable."""


def _micro_batch(
    model: Any,
    accumulation: Accumulation,
    batch: Any,
    samples: Any,
    index: Any = 0,
) -> tuple[weighting.MicroBatch, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Returns:
        Its loss as it enters the window, and its predictions.
    """
    x = batch[0]
    window = accumulation.window
    replicas = model.distribute_strategy.num_replicas_in_sync
    first = index == 0
    if window.across:
        first = tf.logical_and(first, window.is_empty())
    with tf.GradientTape() as tape:
        with accumulation.forward(first):
            y_pred = keras_internals.forward(model, x)
        part = weighting.weigh(
            model, accumulation, batch, y_pred, first, samples, replicas
        )
    gradients = tape.gradient(part.objective, window.variables)
    # See `Window.close_full` on data that runs out.
    with tf.control_dependencies([part.contribution]):
        if window.variables:
            window.add(gradients, first, part.late, part.divisor)
        if window.recorder is not None:
            window.recorder.add(
                # The rows sum over replicas.
                part.contribution
                if part.divisor is not None
                else part.contribution / replicas,
                part.divisor,
                observation.batch_size(x),
                1 / replicas,
            )
    return part, y_pred


def _summed(carry: list[Any], part: weighting.MicroBatch) -> list[Any]:
    loss, divisor = carry
    loss += tf.cast(part.contribution, loss.dtype)
    if part.divisor is not None:
        divisor += tf.cast(part.divisor, divisor.dtype)
    return [loss, divisor]


def _mean(loss: Any, divisor: Any) -> Any:
    if divisor is None:
        return loss
    divisor = tf.cast(divisor, loss.dtype)
    return tf.math.divide_no_nan(loss, divisor)
