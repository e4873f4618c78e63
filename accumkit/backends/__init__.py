"""One module a framework, chosen once; only they import it.

All have the same functions in the same order; `Backend` says what each does.
"""

import importlib
from typing import Any, Protocol, cast

import keras

from accumkit.window_state import WindowState


class Backend(Protocol):
    """What a backend module offers."""

    def check_options(self, options: dict[str, Any]) -> None:
        """Raises for arguments of `compile` that the backend cannot take."""
        ...

    def create_variables(self, model: Any, state: WindowState) -> None:
        """Creates the variables of the window that are missing."""
        ...

    def traveling_variables(self, state: WindowState) -> list[Any]:
        """Variables that must be handed through the train step."""
        ...

    def train_step(self, model: Any, *args: Any) -> Any:
        """Keras's `train_step` with accumulation."""
        ...

    def apply_window(self, model: Any, state: WindowState) -> None:
        """Takes the optimizer step of the open window, outside a trace."""
        ...

    def discard_window(self, model: Any, state: WindowState) -> None:
        """Empties the window, outside a trace."""
        ...

    def sync(self, model: Any) -> None:
        """Makes the model's variables readable in the middle of `fit`."""
        ...


SUPPORTED = ("tensorflow", "jax", "torch")


def _load() -> Backend:
    name = keras.config.backend()
    if name not in SUPPORTED:
        raise ImportError(
            f"accumkit does not support the Keras backend {name!r}. Set "
            f"`KERAS_BACKEND` to one of {', '.join(SUPPORTED)} before Keras "
            "is imported."
        )
    return cast(Backend, importlib.import_module(f"accumkit.backends.{name}"))


backend = _load()
