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
    weighting,
)
from accumkit.accumulation import Accumulation
from accumkit.backends.jax import joining, metric_state, pieces, two_passes
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
    if accumulation.lacks:
        accumulation.create()
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
    size = accumulation.micro_batch_size
    if accumulation.is_one_piece(samples):
        count = 1
        state, part, y_pred = _micro_batch(model, fixed, state, batch, samples)
        loss = _mean(part.contribution, part.divisor)
    elif accumulation.over_batch:
        state, part, y_pred, count = two_passes.run(
            model, fixed, state, batch, samples
        )
        loss = _mean(part.contribution, part.divisor)
    else:
        state, loss, y_pred, batch, count = _pieces(
            model, fixed, state, batch, samples, size
        )
    state, logs = metric_state.logs(model, state, batch, y_pred, loss, samples)
    others, metrics, values = state
    values, trainable, optimizer = window.close_full(
        values, trainable, optimizer, count
    )
    others = [*others, *window.traveling(values)]
    return logs, (trainable, others, optimizer, metrics)


def _pieces(
    model: Any, fixed: Any, state: Any, batch: Any, samples: Any, size: int
) -> tuple[Any, Any, Any, Any, int]:
    """Works off a batch in pieces of `size` samples, each with its own loss.

    Returns:
        The new state, the loss of the batch, what the metrics have not seen
        yet (predictions, and the part of the batch that they belong to, None:
        nothing), and the number of pieces.
    """
    own = keras_internals.overrides_compute_metrics(model)
    full, last, count = pieces.cut(batch, size, own)
    zero = jnp.zeros((), state[2].denominator.dtype)
    y_pred = None

    def body(carry: Any, piece: Any) -> Any:
        state, *sums = carry
        state, part, y_pred = _micro_batch(model, fixed, state, piece, samples)
        if full.in_order and joined_outputs.are_kept(model, full.size, y_pred):
            return (state, *_summed(sums, part)), y_pred
        state = metric_state.update(model, state, piece, y_pred)
        return (state, *_summed(sums, part)), None

    carry, kept = pieces.loop(body, (state, zero, zero), full)
    (state, *sums), rest = last(carry)
    if rest is not None:
        state, part, y_pred = _micro_batch(model, fixed, state, rest, samples)
        sums = _summed(sums, part)
    if kept is None:
        batch = rest
    else:
        y_pred = kept if rest is None else joining.joined([kept, y_pred])
    return state, _mean(*sums), y_pred, batch, count


def sync(model: Any) -> None:
    """Makes the model's variables readable in the middle of `fit`."""
    model.jax_state_sync()


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
    variables = accumulation.forward_variables(model)
    x = batch[0]

    def objective(trainable: Any) -> tuple[Any, Any]:
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(variables, others, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
            *zip(model.optimizer.variables, optimizer, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            with accumulation.forward(values.first):
                y_pred = keras_internals.forward(model, x)
            # The mask on a prediction does not outlive this function.
            part = weighting.weigh(
                model, accumulation, batch, y_pred, values.first, samples
            )
        updates = (
            [scope.get_current_value(v) for v in variables],
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
