"""Optimizers: which variable is updated, schedules, strategies."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from accumkit import checks
from accumkit.keras_internals.guards import imported, private

# The values that an optimizer has changed in a stateless scope.
_stateless_scope = imported(
    "keras.src.backend.common.stateless_scope", "get_stateless_scope"
)


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
        key = private(leaf, "_var_key")
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


def schedule_of(optimizer: Any) -> Any:
    """Returns the schedule of an optimizer, or None.

    `learning_rate` evaluates it; the object is in `_learning_rate` only.
    """
    rate = private(optimizer, "_learning_rate")
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
    return private(optimizer, "_distribution_strategy")
