"""Who trains: every way to take the optimizer steps. Imports no Keras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

REFERENCES = ("keras", "keras-spe", "micro", "large")
"""The systems that the others are compared with."""


@dataclass(frozen=True)
class System:
    """One way to train a workload.

    Attributes:
        name: Its name on the command line and in the report.
        summary: What it is, for the report.
        accumulates: Who accumulates, if anyone.
        draws: What ``fit`` draws from the data at a time.
        one_execution: Whether ``steps_per_execution`` is a whole window.
        checked: Whether its weights must be those of the large batch.
    """

    name: str
    summary: str
    accumulates: Literal["keras", "across", "within", "optimizer"] | None
    draws: Literal["micro-batch", "window"] = "micro-batch"
    one_execution: bool = False
    checked: bool = False

    def excluded(self, backend: str, couples: bool = False) -> str | None:
        """Why this system doesn't exist on a backend, or None.

        Args:
            backend: The name of the backend.
            couples: Whether the loss couples the samples of a batch.
        """
        if couples and self.accumulates not in (None, "within"):
            return "a loss over the batch is not the sum of its pieces'"
        if self.one_execution and backend == "torch":
            return "Keras on torch has no steps_per_execution"
        return None


_ALL = (
    System("micro", "stock Keras, a step for each micro-batch", None),
    System("large", "stock Keras, the whole window as batch", None, "window"),
    System("keras", "gradient_accumulation_steps", "keras"),
    System(
        "keras-spe",
        "the same, a window per execution",
        "keras",
        one_execution=True,
    ),
    System("across", "accumulation_steps", "across", checked=True),
    System(
        "across-spe",
        "the same, a window per execution",
        "across",
        one_execution=True,
        checked=True,
    ),
    System("within", "micro_batch_size", "within", "window", checked=True),
    System("optimizer", "AccumulationOptimizer", "optimizer", checked=True),
)

SYSTEMS: Mapping[str, System] = {item.name: item for item in _ALL}


def with_references(names: list[str]) -> list[str]:
    """The chosen systems, and the large batch where one is checked on it."""
    chosen = set(names)
    if any(SYSTEMS[name].checked for name in names):
        chosen.add("large")
    return [name for name in SYSTEMS if name in chosen]
