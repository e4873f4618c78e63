"""Several processes on torch: `torch.distributed`."""

from typing import Any

from torch import distributed


def check_strategy(setting: str, model: Any = None) -> None:
    """Nothing to refuse when a model is compiled."""


def check_fit(model: Any, share: dict[str, int | None]) -> None:
    """Nothing to compare: `watch` refuses."""


def watch(model: Any) -> None:
    """Raises where several processes would train.

    Args:
        model: The model.

    Raises:
        ValueError: If there are several; nothing would bring their gradients
            together.
    """
    count = _count()
    if count > 1:
        raise ValueError(
            "Accumulation on torch must not run in more than one process: "
            "nothing would bring their gradients together, and each would "
            "train a model of its own. Received: `torch.distributed` with a "
            f"world size of {count}. Train in one process, or on JAX with "
            "`keras.distribution`."
        )


def is_first(model: Any) -> bool:
    """Whether this process is the one that writes files."""
    return _count() == 1 or distributed.get_rank() == 0


def _count() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
