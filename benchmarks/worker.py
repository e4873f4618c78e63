"""A process that trains on demand.

It reads requests from its standard input, one JSON object a line, and
answers each with one line. A process of its own gives each system a peak
memory of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import keras

from benchmarks.systems import SYSTEMS
from benchmarks.training import Trial, unavailable
from benchmarks.workloads import WORKLOADS

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    # Linux hands the caller's own peak down into a child's ru_maxrss;
    # VmHWM belongs to this process alone.
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Worker:
    """The state between the requests. Each method answers one request."""

    def __init__(self) -> None:
        self._workload = next(iter(WORKLOADS.values()))
        self._trials: dict[str, Trial] = {}
        self._empty = 0

    def load(self, system: str, workload: str, quick: bool) -> dict[str, Any]:
        """Import everything; say what is missing, or the memory so far."""
        item = WORKLOADS[workload]
        if missing := item.missing():
            return {"absent": f"needs {' and '.join(missing)}"}
        for module in item.requires:
            importlib.import_module(module)
        if reason := unavailable(SYSTEMS[system]):
            return {"absent": reason}
        # With this Keras imports what it has put off: TensorFlow, for one,
        # on every backend. It would count as the training's memory.
        keras.utils.set_random_seed(0)
        self._workload = item.quick() if quick else item
        self._empty = peak_memory()
        return {"empty": self._empty}

    def prepare(
        self, system: str, jit: bool, calls: int, seconds: float
    ) -> dict[str, Any]:
        """Build, compile, trace and train; then size the measurements.

        The peak memory is taken in between, where every system has trained
        for as many windows, on as much data.
        """
        trial = Trial(self._workload, SYSTEMS[system], jit)
        trial.warm_up(calls)
        peak = peak_memory() - self._empty
        self._trials[system] = trial
        return {"peak": peak, "windows": trial.lengthen(seconds)}

    def measure(self, system: str, tidy: bool) -> dict[str, Any]:
        """Take one measurement."""
        return {"seconds": self._trials[system].measure(tidy)}

    def finish(self, system: str, folder: str) -> dict[str, Any]:
        """Store the weights for the check."""
        path = Path(folder) / f"{system}.npz"
        start = self._trials.pop(system).weights_after_steps(path)
        return {"start": start}


def main() -> None:
    """Answer requests until the input ends."""
    # Whatever a library prints goes to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("request")
        try:
            answer = getattr(worker, name)(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
