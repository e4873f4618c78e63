"""The private parts of Keras that accumkit needs, each with its reason.

Everything else in the package uses public Keras API only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import get_keras_mask
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank

__all__ = [
    "added_loss",
    "all_layers",
    "apply_mask",
    "compile_loss",
    "compute_loss",
    "computes_in_float16",
    "forward",
    "get_keras_mask",
    "loss_tracker",
    "overrides_compute_loss",
    "replaced_losses",
    "schedule_of",
    "scheduled_optimizer",
    "squeeze_or_expand_to_same_rank",
    "update_metrics",
]
# `get_keras_mask`: the mask on a prediction decides what the loss divides by,
# and no public function reads it. `apply_mask` and
# `squeeze_or_expand_to_same_rank`: a divisor of "mean_with_sample_weight" must
# be formed exactly as the loss forms it.


def forward(model: Any, x: Any) -> Any:
    """Calls the model in training mode, as Keras's own train step does.

    `_call_has_training_arg` spares models whose `call` takes no `training`.
    """
    if model._call_has_training_arg:
        return model(x, training=True)
    return model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
    """Calls `model.compute_loss`, also where it takes no `training` argument.

    `_compute_loss` is Keras's own wrapper for overrides of before Keras 3.3.
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True
    )


def overrides_compute_loss(model: Any) -> bool:
    """Whether the class brings its own `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def loss_tracker(model: Any) -> Any:
    """Returns the metric behind `loss` in the logs.

    A train step has to update it, and no public attribute holds it.
    """
    return model._loss_tracker


def update_metrics(model: Any, batch: Any, y_pred: Any) -> None:
    """Updates the metrics of a piece whose results nobody reads.

    Computing them is what most of a stock `compute_metrics` does; leaving it
    out needs `_compile_metrics`. An override is called as it is.
    """
    x, y, weights = batch
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        model.compute_metrics(x, y, y_pred, sample_weight=weights)
    elif model._compile_metrics is not None:
        model._compile_metrics.update_state(y, y_pred, weights)


def compile_loss(model: Any) -> Any:
    """Returns the `CompileLoss` made from `compile(loss=...)`, or None."""
    return model._compile_loss


def added_loss(model: Any, loss: Any) -> Any:
    """Returns a penalty or added loss as it enters the total loss.

    On TensorFlow Keras divides it by the number of replicas.
    """
    return model._aggregate_additional_loss(loss)


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
    entries, metrics = compiled._flat_losses, compiled._metrics
    losses = [replace(entry.loss, entry.name) for entry in entries]
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


def all_layers(model: Any) -> dict[str, Any]:
    """Returns every layer inside a model by its path, however deeply nested.

    `Model.layers` stops at the first level and passes over what custom layers
    hold, and `layer.path` does not tell where a nested model stands; Keras
    itself walks `_layers`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(layer: Any, prefix: str) -> None:
        for inner in layer._layers:
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            found[f"{prefix}{inner.name}"] = inner
            walk(inner, f"{prefix}{inner.name}/")

    walk(model, "")
    return found


def computes_in_float16(model: Any) -> bool:
    """Whether any layer does; a policy may be set on a single layer."""
    layers = [model, *all_layers(model).values()]
    return any(layer.compute_dtype == "float16" for layer in layers)


def schedule_of(optimizer: Any) -> Any:
    """Returns the schedule of an optimizer, or None.

    `learning_rate` evaluates it; the object is in `_learning_rate` only.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    kind = keras.optimizers.schedules.LearningRateSchedule
    return rate if isinstance(rate, kind) else None


def scheduled_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer in or inside `optimizer` that has a schedule."""
    while optimizer is not None:
        if schedule_of(optimizer) is not None:
            return optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None
