"""A window of gradients on TensorFlow, under any train step."""

from typing import Any

import tensorflow as tf

from accumkit import weighting
from accumkit.backends import tensorflow as window
from accumkit.backends.optimizers import Trained
from accumkit.window_state import WindowState


def create_variables(
    optimizer: Any, trained: Trained, state: WindowState
) -> None:
    """Builds the wrapped optimizer and the variables of the window."""
    trained.distribute_strategy = optimizer._distribution_strategy
    if state.accumulation_steps > 1:
        window.create_variables(trained, state)
    elif not trained.optimizer.built:
        trained.optimizer.build(trained.trainable_variables)


def replica_id() -> int:
    """The replica that the calling code works for."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if replica is None else int(replica)


def is_traced() -> bool:
    """Whether the calling code is traced rather than run."""
    return not tf.executing_eagerly()


def apply(
    trained: Trained, state: WindowState, gradients: list[Any], weight: Any
) -> None:
    """Adds a micro-batch; takes an optimizer step in a full window.

    Args:
        trained: The wrapped optimizer and what it trains.
        state: The window.
        gradients: One for each variable, or None.
        weight: What the micro-batch weighs, None for 1.

    Raises:
        ValueError: If it is called in cross-replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "`apply` must be called in replica context. Received: a call in "
            "the cross-replica context of a strategy. Call it in what "
            "`strategy.run` runs."
        )
    first = state.open_batches.value == 0
    given = 1 if weight is None else tf.stop_gradient(weight)
    # The optimizer sums over the replicas and D counts all of them.
    replicas = trained.distribute_strategy.num_replicas_in_sync
    factor = None
    if weight is not None or replicas > 1:
        factor = tf.cast(given, state.denominator.dtype) * replicas
    window._accumulate(
        trained,
        state,
        gradients,
        factor,
        weighting.Weight(given),
        first,
    )
    # When data runs out in the middle of a graph, ops that do not wait for it
    # still run: counting would count a batch that never came.
    ready = next(g for g in gradients if g is not None)
    if isinstance(ready, tf.IndexedSlices):
        ready = ready.values
    with tf.control_dependencies([ready]):
        context.merge_call(
            lambda strategy: window._close_full_window(
                strategy, trained, state, 1
            )
        )


def stateless_apply(
    trained: Trained,
    state: WindowState,
    gradients: list[Any],
    weight: Any,
    optimizer_values: list[Any],
    trainable_values: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Raises: as in Keras, an optimizer on TensorFlow has no such form."""
    raise ValueError(
        "`stateless_apply` is not supported with the TensorFlow backend (nor "
        "is it in Keras). Received: an AccumulationOptimizer. Call `apply`."
    )


def apply_window(trained: Trained, state: WindowState) -> None:
    """Takes the optimizer step of the open window, outside a trace."""
    window.apply_window(trained, state)


def discard_window(trained: Trained, state: WindowState) -> None:
    """Empties the window, outside a trace."""
    window.discard_window(trained, state)
