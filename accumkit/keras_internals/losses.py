"""Keras's compiled loss, masks and penalties."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from accumkit.keras_internals.guards import imported, private

# `get_keras_mask`: the mask on a prediction decides what the loss divides by,
# and no public function reads it, or puts it on. `apply_mask` and
# `squeeze_or_expand_to_same_rank`: a divisor of "mean_with_sample_weight" must
# be formed exactly as the loss forms it.
# Where it is defined: Keras 3.16 took it out of `keras.src.backend`.
get_keras_mask = imported("keras.src.backend.common.masking", "get_keras_mask")
set_keras_mask = imported("keras.src.backend.common.masking", "set_keras_mask")
apply_mask = imported("keras.src.losses.loss", "apply_mask")
squeeze_or_expand_to_same_rank = imported(
    "keras.src.losses.loss", "squeeze_or_expand_to_same_rank"
)


def compile_loss(model: Any) -> Any:
    """Returns the `CompileLoss` made from `compile(loss=...)`, or None."""
    return private(model, "_compile_loss")


def added_losses(model: Any) -> tuple[list[Any], list[Any]]:
    """Returns what layers added, and the penalties on the weights.

    `Model.losses` has both in one list, the penalties at its end, one for
    each trainable weight with a regularizer.
    """
    losses = list(model.losses)
    penalties = sum(v.regularizer is not None for v in model.trainable_weights)
    split = len(losses) - penalties
    return losses[:split], losses[split:]


def added_loss(model: Any, loss: Any) -> Any:
    """Returns a penalty or added loss as it enters the total loss.

    On TensorFlow Keras divides it by the number of replicas.
    """
    return private(model, "_aggregate_additional_loss")(loss)


def replace_added_losses(model: Any, losses: list[Any]) -> None:
    """Has a model's added losses be these.

    `add_loss` adds to what layers added; only `_clear_losses` takes that away.
    A `Functional` model has no `add_loss` of its own.

    Args:
        model: The model.
        losses: Tensors.
    """
    private(model, "_clear_losses")()
    for loss in losses:
        keras.layers.Layer.add_loss(model, loss)


@contextlib.contextmanager
def unmistakable_targets(compiled: Any) -> Iterator[None]:
    """Has a `CompileLoss` take a bare tensor for the targets of one output.

    Where a model has several outputs and a loss on one of them, the targets
    may be a bare tensor. Keras first tries it as a list with an entry for each
    output, and succeeds if it happens to have as many samples. That is rare
    for a batch, and the rule for a piece of one.

    Args:
        compiled: A `CompileLoss`; only its `_user_loss` says which output has
            a loss.
    """
    call = compiled.call

    def structured(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nested = keras.tree.is_nested
        if nested(y_pred) and not nested(y_true) and y_true is not None:
            losses = private(compiled, "_user_loss")
            one = [v is not None for v in keras.tree.flatten(losses)]
            if nested(losses) and sum(one) == 1:
                targets = [y_true if wanted else None for wanted in one]
                y_true = keras.tree.pack_sequence_as(losses, targets)
        return call(y_true, y_pred, sample_weight)

    # On the instance, where `__call__` finds it before that of the class.
    compiled.call = structured
    try:
        yield
    finally:
        del compiled.call


@contextlib.contextmanager
def replaced_losses(
    compiled: Any,
    replace: Callable[[Any, str], Any],
    replace_metric: Callable[[Any, Any], Any],
) -> Iterator[None]:
    """Has a `CompileLoss` call stand-ins for its losses and their metrics.

    Only its `_flat_losses` (entries `(path, loss, loss_weights, name)`) say
    which loss with which reduction works on which output, and `_metrics` which
    metric averages it (none for a single output).

    Args:
        compiled: A built `CompileLoss`.
        replace: `(loss, name)` to what is called in place of the loss.
        replace_metric: `(metric, what replaces its loss)` to what is updated
            in place of the metric.
    """
    entries = private(compiled, "_flat_losses")
    metrics = private(compiled, "_metrics")
    losses = [
        replace(private(entry, "loss"), private(entry, "name"))
        for entry in entries
    ]
    compiled._flat_losses = [
        entry._replace(loss=loss)
        for entry, loss in zip(entries, losses, strict=True)
    ]
    # A single output has no metric of its own.
    compiled._metrics = [
        replace_metric(metric, loss)
        for metric, loss in zip(metrics, losses, strict=bool(metrics))
    ]
    try:
        yield
    finally:
        compiled._flat_losses, compiled._metrics = entries, metrics
