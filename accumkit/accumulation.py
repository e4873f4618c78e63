"""What a model with the mixin keeps from one `compile` to the next."""

import dataclasses
from typing import Any

from accumkit.options import Options


@dataclasses.dataclass
class Findings:
    """What is found out about a model while its train step is traced.

    Answers that need a walk through all layers; a new train function asks
    again.

    Attributes:
        float16: Whether any layer computes in float16; None: not known yet.
        inspected: Whether the model has been looked at for trainable weights.
    """

    float16: bool | None = None
    inspected: bool = False


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
        recording: Arguments of the `WindowRecorder` that somebody asked for.
    """

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.window: Any = None
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
        return (
            self.across
            or self.micro_batch_size is not None
            or self.recording is not None
        )

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
        """Whether each batch is a window of one micro-batch, as in Keras.

        Then nothing is weighted or divided, and the weights stay those of
        stock Keras to the bit.
        """
        return not self.across and self.micro_batch_size is None

    def open_batch_count(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return 0 if self.window is None else self.window.open_batches()

    def config(self) -> dict[str, Any]:
        """The options, as `compile` takes them."""
        return self.options.config()
