"""Several processes on TensorFlow: what the strategy says."""

from typing import Any

import tensorflow as tf


def check_strategy(setting: str, model: Any = None) -> None:
    """Raises for a strategy under which windows cannot be kept.

    Args:
        setting: What asks for accumulation, for the message.
        model: The model, where there is one.

    Raises:
        ValueError: If it is a `ParameterServerStrategy`: its workers do not
            wait for each other, so that none can say when a window is full.
    """
    strategy = tf.distribute.get_strategy()
    if model is not None:
        strategy = model.distribute_strategy
    asynchronous = (
        tf.distribute.ParameterServerStrategy,
        tf.compat.v1.distribute.experimental.ParameterServerStrategy,
    )
    if isinstance(strategy, asynchronous):
        raise ValueError(
            f"`{setting}` must not be used under a `ParameterServerStrategy`: "
            "its workers do not wait for each other, so that there is no "
            "window which they could fill together. Received: "
            f"{type(strategy).__name__}. Use `MirroredStrategy`, or a larger "
            "batch."
        )


def check_fit(model: Any, share: dict[str, int | None]) -> None:
    """Nothing to compare: the strategy divides the batches itself."""


def watch(model: Any) -> None:
    """Nothing to watch: the strategy sees to what its replicas do."""


def is_first(model: Any) -> bool:
    """Whether this process is the one that writes files."""
    strategy = model.distribute_strategy
    cluster: Any = getattr(strategy, "cluster_resolver", None)
    if cluster is None or cluster.task_type in (None, "", "chief"):
        return True
    # Without a chief the first worker stands in for it.
    chief = "chief" in cluster.cluster_spec().jobs
    return cluster.task_type == "worker" and cluster.task_id == 0 and not chief
