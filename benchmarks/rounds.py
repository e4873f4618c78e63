"""One workload: its workers started, prepared, and asked in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import equality
from benchmarks.processes import Absent, Failed, Process
from benchmarks.results import SystemResult, WorkloadResult
from benchmarks.statistics import rotated
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import Workload

QUICK_WORKERS = 2


@dataclass(frozen=True)
class Options:
    """How a run is done.

    Attributes:
        backend: The Keras backend of the workers.
        jit: Whether to ask for XLA.
        quick: Whether everything is in miniature.
        rounds: How often each system is measured.
        seconds: How long a measurement takes at least.
    """

    backend: str
    jit: bool
    quick: bool
    rounds: int
    seconds: float


class Pool:
    """The workers: one for each system, ended after each workload.

    A quick run shares a few workers between all systems and workloads, as
    most of its time would be imports. Its times and memory mean nothing.
    """

    def __init__(self, options: Options, logs: Path) -> None:
        self._options = options
        self._logs = logs
        logs.mkdir(exist_ok=True)
        for log in logs.glob("*.log"):
            log.unlink()
        self._workers: dict[str, Process] = {}

    def get(self, system: str) -> Process:
        """The worker of a system, started where there is none."""
        name = system
        if self._options.quick:
            name = f"quick-{list(SYSTEMS).index(system) % QUICK_WORKERS}"
        if name not in self._workers:
            log = self._logs / f"{name}.log"
            self._workers[name] = Process(self._options.backend, log)
        return self._workers[name]

    def done(self) -> None:
        """End the workers of a workload, unless they are shared."""
        if not self._options.quick:
            self.close()

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.popitem()[1].close()


class Bench:
    """One workload and the systems that run it.

    Args:
        workload: What is trained.
        names: The systems.
        options: How.
        pool: The workers.
        say: Reports progress.
    """

    def __init__(
        self,
        workload: Workload,
        names: list[str],
        options: Options,
        pool: Pool,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._pool = pool
        self._say = say
        self._name = workload.name
        self.result = WorkloadResult(
            workload.quick() if options.quick else workload
        )
        for name in names:
            self.result.systems[name] = SystemResult(
                name,
                checked=SYSTEMS[name].checked,
                absent=SYSTEMS[name].excluded(
                    options.backend, workload.couples
                ),
            )

    def run(self, folder: Path) -> WorkloadResult:
        """Measure, then compare the weights; ``folder`` holds them."""
        options = self._options
        for system, answer in self._ask(
            "load", together=True, workload=self._name, quick=options.quick
        ):
            system.empty = answer["empty"]
        for system, answer in self._ask(
            "prepare",
            together=options.quick,
            jit=options.jit,
            calls=1 if options.quick else 2,
            seconds=options.seconds,
        ):
            system.windows = answer["windows"]
            system.peak = answer["peak"]
        for turn in range(options.rounds):
            self._say(f"{self._name}: round {turn + 1} of {options.rounds}")
            for system, answer in self._ask(
                "measure",
                together=options.quick,
                turn=turn,
                tidy=not options.quick,
            ):
                system.seconds.append(answer["seconds"])
        self._say(f"{self._name}: the weights")
        self._compare(folder)
        return self.result

    def _ask(
        self,
        request: str,
        together: bool = False,
        turn: int = 0,
        **arguments: Any,
    ) -> Iterator[tuple[SystemResult, dict[str, Any]]]:
        """Ask every system that is still there, together or in turn."""
        systems = [
            system
            for system in self.result.systems.values()
            if not system.absent and not system.failure
        ]
        if together:
            for system in systems:
                self._pool.get(system.name).ask(
                    request, system.name, **arguments
                )
        for system in rotated(systems, turn):
            worker = self._pool.get(system.name)
            if not together:
                worker.ask(request, system.name, **arguments)
            try:
                answer = worker.answer()
            except Absent as reason:
                system.absent = str(reason)
            except Failed as reason:
                self._say(f"{self._name}: {system.name}: {reason}")
                system.failure = str(reason)
            else:
                yield system, answer

    def _compare(self, folder: Path) -> None:
        starts: dict[str, str] = {}
        for system, answer in self._ask(
            "finish", together=self._options.quick, folder=str(folder)
        ):
            starts[system.name] = answer["start"]
        if "large" not in starts:
            return
        large = folder / "large.npz"
        before = equality.stored(large, "before")
        expected = equality.stored(large, "after")
        for name, start in starts.items():
            if name != "large":
                self.result.systems[name].agreement = equality.agreement(
                    before,
                    equality.stored(folder / f"{name}.npz", "after"),
                    expected,
                    same_start=start == starts["large"],
                )
