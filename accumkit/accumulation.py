"""What a model with the mixin keeps from one `compile` to the next."""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from typing import Any

from accumkit.options import Options
from accumkit.pooled_statistics import PooledStatistics
from accumkit.recording import WindowRecorder
from accumkit.unlike_passes import PassComparison


@dataclasses.dataclass
class Findings:
    """What is found out about a model while its train step is traced.

    Answers that need a walk through all layers; a new train function asks
    again.

    Attributes:
        float16: Whether any layer computes in float16; None: not known yet.
        inspected: Whether the model has been looked at for trainable weights.
        rows_checked: Whether its outputs are known to have a row a sample.
    """

    float16: bool | None = None
    inspected: bool = False
    rows_checked: bool = False


class Accumulation:
    """Options, the window, and what was found out.

    It hangs on the model as one plain object, which Keras's attribute
    tracking passes over, so none of the window's variables is a weight.

    Args:
        options: What `compile` was asked for.

    Attributes:
        options: Replaced as a whole where N changes.
        window: The backend's `Window`, once the model is built.
        findings: What was found out while tracing.
        warned: Keys of the warnings given since `compile`.
        fit_batch_size: The batch size of the running `fit`, if it is known.
        shares_agree: Whether all processes are known to get equal batches in
            it.
        entered: Whether our train step was run, or traced, since `compile`.
        comparison: A `PassComparison`, where batches are passed twice.
        pooled_layers: BatchNormalization layers whose statistics are to be
            pooled over a window, by path.
        pooling: Their `PooledStatistics`.
        recording: Arguments of the `WindowRecorder` that somebody asked for.
    """

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.window: Any = None
        self.comparison: PassComparison | None = None
        self.pooled_layers: dict[str, Any] = {}
        self.pooling: PooledStatistics | None = None
        self.findings = Findings()
        self.warned: set[str] = set()
        self.fit_batch_size: int | None = None
        self.shares_agree = False
        self.entered = False
        self.recording: tuple[bool, int] | None = None

    @property
    def accumulation_steps(self) -> int:
        """N, batches in a full window."""
        return self.options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self.options = dataclasses.replace(
            self.options, accumulation_steps=value
        )

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in a piece of a batch, or None."""
        return self.options.micro_batch_size

    @property
    def remainder(self) -> str:
        """What becomes of a window open at the end of an epoch."""
        return self.options.remainder

    @property
    def weighting(self) -> str:
        """`"exact"` or `"uniform"`."""
        return self.options.weighting

    @property
    def over_batch(self) -> bool:
        """Whether the loss sees the outputs of all pieces of a batch."""
        return self.options.loss_over == "batch"

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step takes more than one backward pass."""
        return self.across or self.micro_batch_size is not None

    @property
    def recorder(self) -> Any:
        """The window's recorder, if somebody asked for one."""
        return None if self.window is None else self.window.recorder

    @property
    def across(self) -> bool:
        """Whether a window spans several batches."""
        window = self.window
        return self.accumulation_steps > 1 or (
            window is not None and window.across
        )

    @property
    def active(self) -> bool:
        """Whether anything differs from the stock train step."""
        return self.accumulates or self.recording is not None

    @property
    def setting(self) -> tuple[str, int | None]:
        """What asks for our train step, by its public name, and its value."""
        if self.across:
            return "accumulation_steps", self.accumulation_steps
        if self.micro_batch_size is not None:
            return "micro_batch_size", self.micro_batch_size
        return "EffectiveStepLogger", None

    @property
    def whole(self) -> bool:
        """Whether each loss is that of a whole window, as in Keras.

        Then nothing is weighted or divided.
        """
        return not self.across and (
            self.micro_batch_size is None or self.over_batch
        )

    def is_one_piece(self, samples: Any) -> bool:
        """Whether a batch is known to be worked off at once.

        Args:
            samples: Samples in it: an int or a tensor.
        """
        size = self.micro_batch_size
        if size is None:
            return True
        return self.over_batch and isinstance(samples, int) and samples <= size

    def check_passes(self) -> None:
        """Raises if the passes of a batch differed; waits for the device."""
        if self.comparison is not None:
            self.comparison.check()

    @property
    def lacks(self) -> bool:
        """Whether variables beside those of the window are still missing."""
        compares = self.over_batch and self.comparison is None
        pools = bool(self.pooled_layers) and self.pooling is None
        records = self.recording is not None and self.recorder is None
        return compares or pools or records

    def create(self) -> None:
        """Creates them."""
        if self.over_batch and self.comparison is None:
            self.comparison = PassComparison()
        if self.pooled_layers and self.pooling is None:
            self.pooling = PooledStatistics(self.pooled_layers)
        if self.recording is not None and self.recorder is None:
            self.window.recorder = WindowRecorder(*self.recording)

    def forward_variables(self, model: Any) -> list[Any]:
        """Variables that a forward pass may change; their values travel on JAX.

        Args:
            model: The model, whose own stand in front.
        """
        own = list(model.non_trainable_variables)
        return own + self.own_forward_variables

    @property
    def own_forward_variables(self) -> list[Any]:
        """Those of them that are ours."""
        pooled = [] if self.pooling is None else self.pooling.variables
        if self.comparison is None:
            return pooled
        return [*pooled, self.comparison.variable]

    def forward(self, opens: Any) -> AbstractContextManager[None]:
        """A block for the forward pass of a micro-batch, in the train step.

        Args:
            opens: Bool or scalar bool tensor, whether it opens a window.
        """
        if self.pooling is None or not self.pooled_layers:
            return contextlib.nullcontext()
        return self.pooling.pooling(opens)

    def open_batch_count(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return 0 if self.window is None else self.window.open_batches()

    def config(self) -> dict[str, Any]:
        """The options, as `compile` takes them."""
        return self.options.config()
