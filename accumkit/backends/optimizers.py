"""`AccumulationOptimizer`'s side of the backends, chosen once.

Each framework has a module `<framework>_optimizer` beside its own; it turns
gradients that it is given into a window with the functions that the train
step of the mixin uses.
"""

import importlib
from typing import Any, Protocol, cast

import keras

from accumkit.backends import backend
from accumkit.window_state import WindowState


class Trained:
    """What the backends ask of a model, answered for an optimizer.

    The functions that keep a window take a model, but read from it only what
    stands here.

    Args:
        optimizer: The wrapped optimizer.

    Attributes:
        trainable_variables: What the optimizer was built with.
        positions: Their places by `id`.
        distribute_strategy: On TensorFlow that of the optimizer.
        run_eagerly: Whether every micro-batch so far came outside a trace.
        train_function: Another object as soon as a compiled optimizer step
            is out of date.
        weights: What a micro-batch weighs, by replica, while it is worked
            off.
        left_out: Variables that had no gradient when a step was traced.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self.trainable_variables: list[Any] = []
        self.positions: dict[int, int] = {}
        self.distribute_strategy: Any = None
        self.run_eagerly = True
        self.train_function = object()
        self.weights: dict[int, Any] = {}
        self.left_out: set[int] = set()

    def build(self, variables: list[Any]) -> None:
        """Takes the variables that will be trained."""
        self.trainable_variables = list(variables)
        self.positions = {id(v): i for i, v in enumerate(variables)}


class OptimizerBackend(Protocol):
    """What a module `<framework>_optimizer` offers."""

    def create_variables(
        self, optimizer: Any, trained: Trained, state: WindowState
    ) -> None:
        """Builds the wrapped optimizer and the variables of the window."""
        ...

    def replica_id(self) -> int:
        """The replica that the calling code works for."""
        ...

    def is_traced(self) -> bool:
        """Whether the calling code is traced rather than run."""
        ...

    def apply(
        self,
        trained: Trained,
        state: WindowState,
        gradients: list[Any],
        weight: Any,
    ) -> None:
        """Adds a micro-batch; takes an optimizer step in a full window."""
        ...

    def stateless_apply(
        self,
        trained: Trained,
        state: WindowState,
        gradients: list[Any],
        weight: Any,
        optimizer_values: list[Any],
        trainable_values: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """As `apply`, on values that are handed in and back."""
        ...

    def apply_window(self, trained: Trained, state: WindowState) -> None:
        """Takes the optimizer step of the open window, outside a trace."""
        ...

    def discard_window(self, trained: Trained, state: WindowState) -> None:
        """Empties the window, outside a trace."""
        ...


optimizer_backend = cast(
    OptimizerBackend,
    importlib.import_module(
        f"accumkit.backends.{keras.config.backend()}_optimizer"
    ),
)
traveling_variables = backend.traveling_variables
