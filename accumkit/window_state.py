"""What a model keeps about its open window."""

from typing import Any


def wide_dtype(dtype: str) -> str:
    """The dtype in which gradients of `dtype` are summed, float32 or wider."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


class WindowState:
    """Options of `compile` and the variables of the open window.

    It hangs on the model as one plain object, which Keras's attribute
    tracking passes over, so none of its variables is a weight.

    Args:
        accumulation_steps: N, batches in a full window.
        micro_batch_size: Samples in a piece of a batch, or None.
        remainder: What becomes of a window open at the end of an epoch.
        weighting: `"exact"` or `"uniform"`.
    """

    def __init__(
        self,
        accumulation_steps: int = 1,
        micro_batch_size: int | None = None,
        remainder: str = "apply",
        weighting: str = "exact",
    ):
        self.accumulation_steps = accumulation_steps
        self.micro_batch_size = micro_batch_size
        self.remainder = remainder
        self.weighting = weighting

        # The backend creates these when the model is built. `steps` is N as
        # the train step sees it (a Python number would freeze in a trace),
        # `window_steps` that of the open window: N set in the middle counts
        # from the next one on.
        self.steps: Any = None
        self.window_steps: Any = None
        self.open_batches: Any = None
        self.open_pieces: Any = None
        self.denominator: Any = None
        # Accumulators by `id` of their variable, so that no freezing or
        # unfreezing can pair them wrongly; the variable is kept beside it so
        # that its id stays taken.
        self.accumulators: dict[int, tuple[Any, Any]] = {}

        # The batch size of the running `fit`, if it is known.
        self.fit_batch_size: int | None = None

        # If somebody wants to know what happens in each window: arguments for
        # a `WindowRecorder`, and the recorder once the backend has made it.
        self.recording: tuple[bool, int] | None = None
        self.recorder: Any = None
        self.means = True

        # A compiled optimizer step for the remainder, where eager ones fail.
        self.applying: Any = None

        # Variables that got a gradient: the others stay None for the
        # optimizer, where zeros would let decay and momentum move them.
        self.touched: set[int] = set()
        # Found out in the first trace: whether the sum of gradients is to be
        # divided by D.
        self.divides = True
        self.warned: set[str] = set()
        # Answers that need a walk through all layers: whether the model
        # computes in float16, whether it has been looked at for weights.
        self.float16: bool | None = None
        self.inspected = False

    @property
    def across(self) -> bool:
        """Whether a window spans several batches."""
        return self.accumulation_steps > 1 or self.steps is not None

    @property
    def active(self) -> bool:
        """Whether anything differs from the stock train step."""
        return (
            self.across
            or self.micro_batch_size is not None
            or self.recording is not None
        )

    @property
    def whole(self) -> bool:
        """Whether each batch is a window of one micro-batch, as in Keras.

        Then nothing is weighted or divided, and the weights stay those of
        stock Keras to the bit.
        """
        return not self.across and self.micro_batch_size is None

    def open_batch_count(self) -> int:
        """How many batches the open window holds; waits for the device."""
        count = self.open_batches
        if count is None:
            return 0
        return int(count.numpy() if hasattr(count, "numpy") else count)

    def config(self) -> dict[str, Any]:
        """The options, as `compile` takes them."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "micro_batch_size": self.micro_batch_size,
            "remainder": self.remainder,
            "weighting": self.weighting,
        }
