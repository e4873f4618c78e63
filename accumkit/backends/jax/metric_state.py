"""Updating metrics on JAX, where their values travel."""

from typing import Any

import keras

from accumkit import keras_internals


def update(model: Any, state: Any, batch: Any, y_pred: Any) -> Any:
    """Updates the metrics with a piece.

    Args:
        model: The model.
        state: Values of its other variables, the metrics, and the window.
        batch: The piece.
        y_pred: Its predictions.

    Returns:
        The new state.
    """
    others, metrics, values = state
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(mapping) as scope:
        keras_internals.update_metrics(model, batch, y_pred)
    metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    return others, metrics, values


def logs(
    model: Any, state: Any, batch: Any, y_pred: Any, loss: Any, samples: Any
) -> tuple[Any, Any]:
    """Updates the metrics with what they have not seen yet, if anything.

    Args:
        model: The model.
        state: Values of its other variables, the metrics, and the window.
        batch: What they have not seen; None: nothing.
        y_pred: Its predictions.
        loss: The loss of the batch.
        samples: Its samples.

    Returns:
        The new state, and the logs.
    """
    others, metrics, values = state
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(mapping) as scope:
        keras_internals.loss_tracker(model).update_state(
            loss, sample_weight=samples
        )
        if batch is None:
            results = model.get_metrics_result()
        else:
            x, y, sample_weight = batch
            results = model.compute_metrics(x, y, y_pred, sample_weight)
    metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    return (others, metrics, values), results
