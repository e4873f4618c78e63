"""The private parts of Keras that accumkit needs, each with its reason.

Everything else in the package uses public Keras API only. Keras may move any
of these in any release: each is read through `_imported` or `_private`, which
say so, instead of an `ImportError` or `AttributeError` from somewhere inside.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from accumkit import checks
from accumkit._version import __version__

__all__ = [
    "added_loss",
    "added_losses",
    "all_layers",
    "apply_mask",
    "build",
    "compile_loss",
    "compute_loss",
    "computes_in_float16",
    "distribution_strategy",
    "forward",
    "get_keras_mask",
    "guarded_updates",
    "initial_epoch",
    "loss_tracker",
    "overrides_compute_loss",
    "overrides_compute_metrics",
    "put_back_state",
    "raw_value",
    "replaced_losses",
    "schedule_of",
    "scheduled_optimizer",
    "squeeze_or_expand_to_same_rank",
    "unmistakable_targets",
    "update_metrics",
    "update_where",
]


def _missing(name: str) -> str:
    return (
        f"accumkit {__version__} builds on a private part of Keras, `{name}`, "
        f"that Keras {keras.__version__} does not have. Install a version of "
        "Keras that accumkit's README lists as tested, or a newer accumkit."
    )


def _imported(module: str, name: str) -> Any:
    """Imports a private name; says which Keras lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(_missing(f"{module}.{name}")) from error


def _private(owner: Any, name: str) -> Any:
    """Reads a private attribute; says which Keras lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        # Not an AttributeError, which `hasattr` and properties swallow.
        raise RuntimeError(_missing(f"{type(owner).__name__}.{name}")) from (
            error
        )


# `get_keras_mask`: the mask on a prediction decides what the loss divides by,
# and no public function reads it. `apply_mask` and
# `squeeze_or_expand_to_same_rank`: a divisor of "mean_with_sample_weight" must
# be formed exactly as the loss forms it.
# Where it is defined: Keras 3.16 took it out of `keras.src.backend`.
get_keras_mask = _imported("keras.src.backend.common.masking", "get_keras_mask")
apply_mask = _imported("keras.src.losses.loss", "apply_mask")
squeeze_or_expand_to_same_rank = _imported(
    "keras.src.losses.loss", "squeeze_or_expand_to_same_rank"
)
# The values that an optimizer has changed in a stateless scope.
_stateless_scope = _imported(
    "keras.src.backend.common.stateless_scope", "get_stateless_scope"
)


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
    if _private(model, "_call_has_training_arg"):
        return model(x, training=True)
    return model(x)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
    """Calls `model.compute_loss`, also where it takes no `training` argument.

    `_compute_loss` is Keras's own wrapper for overrides of before Keras 3.3.
    """
    return _private(model, "_compute_loss")(
        x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True
    )


def overrides_compute_loss(model: Any) -> bool:
    """Whether the class brings its own `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def loss_tracker(model: Any) -> Any:
    """Returns the metric behind `loss` in the logs.

    A train step has to update it, and no public attribute holds it.
    """
    return _private(model, "_loss_tracker")


def overrides_compute_metrics(model: Any) -> bool:
    """Whether the class brings its own `compute_metrics`."""
    return type(model).compute_metrics is not keras.Model.compute_metrics


def update_metrics(model: Any, batch: Any, y_pred: Any) -> None:
    """Updates the metrics of a piece whose results nobody reads.

    Computing them is what most of a stock `compute_metrics` does; leaving it
    out needs `_compile_metrics`. An override is called as it is.
    """
    x, y, weights = batch
    if overrides_compute_metrics(model):
        model.compute_metrics(x, y, y_pred, sample_weight=weights)
        return
    metrics = _private(model, "_compile_metrics")
    if metrics is not None:
        metrics.update_state(y, y_pred, weights)


def compile_loss(model: Any) -> Any:
    """Returns the `CompileLoss` made from `compile(loss=...)`, or None."""
    return _private(model, "_compile_loss")


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
    return _private(model, "_aggregate_additional_loss")(loss)


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
            losses = _private(compiled, "_user_loss")
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
    entries = _private(compiled, "_flat_losses")
    metrics = _private(compiled, "_metrics")
    losses = [
        replace(_private(entry, "loss"), _private(entry, "name"))
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


def all_layers(model: Any) -> dict[str, Any]:
    """Returns every layer inside a model by its path, however deeply nested.

    `Model.layers` stops at the first level and passes over what custom layers
    hold, and `layer.path` does not tell where a nested model stands; Keras
    itself walks `_layers`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(layer: Any, prefix: str) -> None:
        for inner in _private(layer, "_layers"):
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


@contextlib.contextmanager
def guarded_updates(
    optimizer: Any,
    variables: list[Any],
    guard: Callable[[int, Any, Callable[[], Any]], None],
) -> Iterator[None]:
    """Has updates of some variables go through a function.

    An optimizer can only be told at the time of tracing that a variable has
    no gradient. All that changes a variable and its slots is `update_step`,
    which is public; `_var_key` says which variable it is called with (on
    TensorFlow a variable of one replica).

    Args:
        optimizer: An optimizer, with all that it wraps.
        variables: The variables whose updates are guarded.
        guard: `(index in variables, variable as updated, update)`; calls
            `update()` or does not.
    """
    leaves = [
        one
        for one in checks.nested_optimizers(optimizer)
        if not hasattr(one, "inner_optimizer")
    ]

    def guarded(leaf: Any) -> Callable[..., None]:
        step = leaf.update_step
        key = _private(leaf, "_var_key")
        positions = {key(v): i for i, v in enumerate(variables)}

        def update_step(gradient: Any, variable: Any, rate: Any) -> None:
            index = positions.get(key(variable))
            if index is None:
                step(gradient, variable, rate)
            else:
                guard(index, variable, lambda: step(gradient, variable, rate))

        return update_step

    replaced = {id(leaf): guarded(leaf) for leaf in leaves}
    for leaf in leaves:
        # Past Keras's attribute tracking.
        vars(leaf)["update_step"] = replaced[id(leaf)]
    try:
        yield
    finally:
        for leaf in leaves:
            del vars(leaf)["update_step"]


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


def update_where(
    flag: Any, update: Callable[[], Any], before: dict[int, Any]
) -> None:
    """Runs an update in a stateless scope; keeps of it what a flag says.

    Args:
        flag: Scalar bool tensor.
        update: What changes variables.
        before: Values by `id` of their variable, of those that have changed
            before and are to be put back as well.
    """
    mapping = _stateless_scope().state_mapping
    earlier = {**mapping, **before}
    old = dict(mapping)
    update()
    for key, new in mapping.items():
        if key in before or new is not old.get(key):
            mapping[key] = keras.ops.where(flag, new, earlier[key])


def raw_value(variable: Any) -> Any:
    """The value of a variable; None where it was taken away.

    While `fit` runs on JAX variables have none, and `value` would raise.
    """
    return _private(variable, "_value")


def schedule_of(optimizer: Any) -> Any:
    """Returns the schedule of an optimizer, or None.

    `learning_rate` evaluates it; the object is in `_learning_rate` only.
    """
    rate = _private(optimizer, "_learning_rate")
    kind = keras.optimizers.schedules.LearningRateSchedule
    return rate if isinstance(rate, kind) else None


def scheduled_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer in or inside `optimizer` that has a schedule."""
    while optimizer is not None:
        if schedule_of(optimizer) is not None:
            return optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def distribution_strategy(optimizer: Any) -> Any:
    """Returns the `tf.distribute` strategy that an optimizer was made under.

    It is that of the constructor, not of the code that asks.
    """
    return _private(optimizer, "_distribution_strategy")


def initial_epoch(model: Any) -> int:
    """Returns the epoch that the running `fit` started at.

    `fit` tells callbacks no other way.
    """
    return _private(model, "_initial_epoch") or 0
