"""Models: their forward pass, metrics, layers and state."""

from typing import Any

import keras

from accumkit.keras_internals.guards import imported, private
from accumkit.keras_internals.losses import compile_loss


def build(model: Any, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds what Keras would build in the first forward pass.

    In a stateless scope nothing else is changed.
    """
    compiled = compile_loss(model)
    build_loss = (
        compiled is not None
        and not compiled.built
        and not overrides_compute_loss(model)
    )
    if model.built and not build_loss:
        return
    with keras.StatelessScope():
        y_pred = forward(model, x)
        if compiled is not None and build_loss:
            compiled(y, y_pred, sample_weight)


def forward(model: Any, x: Any) -> Any:
    """Calls the model in training mode, as Keras's own train step does.

    `_call_has_training_arg` spares models whose `call` takes no `training`.
    """
    if private(model, "_call_has_training_arg"):
        return model(x, training=True)
    return model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
    """Calls `model.compute_loss`, also where it takes no `training` argument.

    `_compute_loss` is Keras's own wrapper for overrides of before Keras 3.3.
    """
    return private(model, "_compute_loss")(
        x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True
    )


def overrides_compute_loss(model: Any) -> bool:
    """Whether the class brings its own `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def loss_tracker(model: Any) -> Any:
    """Returns the metric behind `loss` in the logs.

    A train step has to update it, and no public attribute holds it.
    """
    return private(model, "_loss_tracker")


def overrides_compute_metrics(model: Any) -> bool:
    """Whether the class brings its own `compute_metrics`."""
    return type(model).compute_metrics is not keras.Model.compute_metrics


def has_metrics(model: Any) -> bool:
    """Whether `update_metrics` has anything to do."""
    metrics = _compiled_metrics(model)
    return metrics is not None or overrides_compute_metrics(model)


def _compiled_metrics(model: Any) -> Any:
    return private(model, "_compile_metrics")


def update_metrics(model: Any, batch: Any, y_pred: Any) -> None:
    """Updates the metrics of a piece whose results nobody reads.

    Computing them is what most of a stock `compute_metrics` does; leaving it
    out needs `_compile_metrics`. An override is called as it is.
    """
    x, y, weights = batch
    if overrides_compute_metrics(model):
        model.compute_metrics(x, y, y_pred, sample_weight=weights)
        return
    metrics = _compiled_metrics(model)
    if metrics is not None:
        metrics.update_state(y, y_pred, weights)


def all_layers(model: Any) -> dict[str, Any]:
    """Returns every layer inside a model by its path, however deeply nested.

    `Model.layers` stops at the first level and passes over what custom layers
    hold, and `layer.path` does not tell where a nested model stands; Keras
    itself walks `_layers`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(layer: Any, prefix: str) -> None:
        for inner in private(layer, "_layers"):
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


def put_back_state(model: Any, values: Any) -> None:
    """Has `fit` on JAX give a model its values again, which it took out.

    Args:
        model: The model.
        values: Of its trainable, other, optimizer and metrics variables.
    """
    names = ("trainable", "non_trainable", "optimizer", "metrics")
    model._jax_state = {
        f"{name}_variables": of_kind
        for name, of_kind in zip(names, values, strict=True)
    }
    model._jax_state_synced = False


_global_attribute = imported(
    "keras.src.backend.common.global_state", "get_global_attribute"
)
# What numbers without a `seed` are drawn from. It is made when it is first
# asked for, and hangs on no layer.
global_seed = imported(
    "keras.src.random.seed_generator", "global_seed_generator"
)


def global_seed_states() -> list[Any]:
    """The variables of Keras's global seed generator, if there is one."""
    generator = _global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


def raw_value(variable: Any) -> Any:
    """The value of a variable; None where it was taken away.

    While `fit` runs on JAX variables have none, and `value` would raise.
    """
    return private(variable, "_value")


def initial_epoch(model: Any) -> int:
    """Returns the epoch that the running `fit` started at.

    `fit` tells callbacks no other way.
    """
    return private(model, "_initial_epoch") or 0
