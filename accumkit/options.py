"""What `compile` was asked for."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `compile`; immutable.

    Attributes:
        accumulation_steps: N, batches in a full window.
        micro_batch_size: Samples in a piece of a batch, or None.
        remainder: What becomes of a window open at the end of an epoch.
        weighting: `"exact"` or `"uniform"`.
        loss_over: What the loss sees, `"micro_batch"` or `"batch"`.
    """

    accumulation_steps: int = 1
    micro_batch_size: int | None = None
    remainder: str = "apply"
    weighting: str = "exact"
    loss_over: str = "micro_batch"

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for."""
        return self == Options()

    def config(self) -> dict[str, Any]:
        """The options, as `compile` takes them."""
        return dataclasses.asdict(self)
