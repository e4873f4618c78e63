"""What a run has found, in the shape in which it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks import equality
from benchmarks.statistics import Spread, speedups, spread
from benchmarks.systems import REFERENCES
from benchmarks.workloads import Workload


@dataclass
class SystemResult:
    """One system on one workload.

    Attributes:
        name: The system.
        checked: Whether its weights must be those of the large batch.
        seconds: Seconds per sample, one value for each round.
        windows: Optimizer steps' worth of samples in one measurement.
        empty: Peak resident bytes before anything was built.
        peak: Peak resident bytes of the training above ``empty``.
        agreement: Its weights against the large batch's.
        absent: Why it was not run.
        failure: What went wrong.
    """

    name: str
    checked: bool
    seconds: list[float] = field(default_factory=list)
    windows: int = 0
    empty: int = 0
    peak: int = 0
    agreement: equality.Agreement | None = None
    absent: str | None = None
    failure: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there are numbers to report."""
        return not self.absent and not self.failure and bool(self.seconds)

    @property
    def wrong(self) -> bool:
        """Whether this result makes the run fail.

        Keras's own failures don't: they are results too. But nothing of
        accumkit counts whose weights were not compared, nor a comparison
        that finds plain micro-batches equal to the large batch.
        """
        if self.name == "micro":
            return self.agreement is not None and self.agreement.holds
        if not self.checked or self.absent:
            return False
        return not (self.measured and self.agreement and self.agreement.holds)


@dataclass
class WorkloadResult:
    """All systems on one workload."""

    workload: Workload
    systems: dict[str, SystemResult] = field(default_factory=dict)

    @property
    def references(self) -> list[str]:
        """The measured systems that the others are compared with."""
        return [name for name in REFERENCES if self.measured(name)]

    def measured(self, name: str) -> bool:
        """Whether a system was part of this run, and succeeded."""
        return name in self.systems and self.systems[name].measured

    def speed(self, name: str, reference: str) -> Spread:
        """How many times as fast as a reference a system was."""
        return spread(
            speedups(
                self.systems[reference].seconds, self.systems[name].seconds
            )
        )


@dataclass
class Run:
    """All workloads of one run, and where it took place."""

    backend: str
    jit: bool
    quick: bool
    rounds: int
    machine: dict[str, Any]
    workloads: list[WorkloadResult] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """The results that make the run fail, in words."""
        return [
            f"{result.workload.name}/{system.name}"
            for result in self.workloads
            for system in result.systems.values()
            if system.wrong
        ]
