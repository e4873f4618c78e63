"""One package a framework, chosen once; only they import it.

All three have the same modules with the same names in the same order:
`window.py` keeps the gradients of a window, whoever adds them;
`train_step.py` is Keras's train step around it, with forward pass, loss and
metrics; `pieces.py` cuts a batch and loops over the pieces; `two_passes.py`
has one loss over all of them. `TrainStep` and `Windows` say what each does.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import keras

from accumkit._start import BACKENDS
from accumkit.accumulation import Accumulation


class TrainStep(Protocol):
    """What `train_step.py` of a backend offers; the mixin uses it."""

    def check_options(self, options: dict[str, Any]) -> None:
        """Raises for arguments of `compile` that the backend cannot take."""
        ...

    def bypassed_methods(self) -> tuple[str, ...]:
        """Methods of a model that only Keras's train step calls."""
        ...

    def making_train_function(self, model: Any) -> AbstractContextManager[None]:
        """A context in which Keras makes the model's train function."""
        ...

    def prepare(self, model: Any, accumulation: Accumulation) -> Any:
        """Creates what is missing of the model's window; returns it."""
        ...

    def train_step(self, model: Any, *args: Any) -> Any:
        """Keras's `train_step` with accumulation."""
        ...

    def sync(self, model: Any) -> None:
        """Makes the model's variables readable in the middle of `fit`."""
        ...


class Window(Protocol):
    """Sums of gradients on their way to one optimizer step.

    It knows an optimizer, the variables that are trained and N, and nothing
    of models, losses and metrics. The mixin's train step owns one, and so
    does an `AccumulationOptimizer`. On JAX what changes a window in a trace
    is a pure function of its `Values`.

    Attributes:
        across: Whether a window spans several batches.
        variables: Those of the train step that was run or traced last.
        recorder: A `WindowRecorder`, or None.
    """

    def track(self, variables: list[Any]) -> None:
        """Creates what is missing for the variables of a train step."""
        ...

    @property
    def traveling_variables(self) -> list[Any]:
        """Variables whose values Keras must hand through a train step."""
        ...

    def add(self, *args: Any) -> Any:
        """Adds the gradients of a micro-batch."""
        ...

    def close_full(self, *args: Any) -> Any:
        """Counts a batch; takes the optimizer step if the window is full."""
        ...

    def take(self, gradients: list[Any], weight: Any = None) -> None:
        """Adds a micro-batch and closes the window if that fills it."""
        ...

    def stateless_take(self, *values: Any) -> Any:
        """As `take`, on values that are handed in and back."""
        ...

    def apply(self) -> None:
        """Takes the optimizer step of the open window, outside a trace."""
        ...

    def discard(self) -> None:
        """Empties the window, outside a trace."""
        ...

    def forget_traces(self) -> None:
        """Has everything compiled anew: optimizer or schedule has changed."""
        ...

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on."""
        ...

    def open_batches(self) -> int:
        """How many batches the open window holds; waits for the device."""
        ...

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds; waits for the device."""
        ...


class Windows(Protocol):
    """What `window.py` of a backend offers; `AccumulationOptimizer` uses it."""

    Window = Window

    def replica_id(self) -> int:
        """The replica that the calling code works for."""
        ...


class Randomness(Protocol):
    """What `randomness.py` of a backend offers; `kept_state` uses it."""

    def state(self) -> Any:
        """Where the framework's own random numbers stand."""
        ...

    def put_back(self, value: Any) -> None:
        """Puts back what `state` returned."""
        ...


class Processes(Protocol):
    """What `processes.py` of a backend offers: training in several of them."""

    def check_strategy(self, setting: str, model: Any = None) -> None:
        """Raises at `compile` where processes cannot keep a window."""
        ...

    def check_fit(self, model: Any, share: dict[str, int | None]) -> None:
        """Raises at the start of `fit` where the processes' shares differ."""
        ...

    def watch(self, model: Any) -> None:
        """Sees to it that the new train function keeps processes together."""
        ...

    def is_first(self, model: Any) -> bool:
        """Whether this process is the one that writes files."""
        ...


SUPPORTED = BACKENDS


def _load(module: str) -> Any:
    name = keras.config.backend()
    if name not in SUPPORTED:
        raise ImportError(
            f"accumkit does not support the Keras backend {name!r}. Set "
            f"`KERAS_BACKEND` to one of {', '.join(SUPPORTED)} before Keras "
            "is imported."
        )
    return importlib.import_module(f"accumkit.backends.{name}.{module}")


backend = cast(TrainStep, _load("train_step"))
windows = cast(Windows, _load("window"))
randomness = cast(Randomness, _load("randomness"))
processes = cast(Processes, _load("processes"))
