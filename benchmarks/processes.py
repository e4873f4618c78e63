"""The other end of a worker: its process, its requests, its failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


class Absent(Exception):
    """Something that this system or workload needs isn't there."""


class Failed(Exception):
    """The worker answered with an error, or died."""


class Process:
    """A worker process.

    Requests are sent with ``ask`` and their answers taken with ``answer``,
    so that several workers can be at work at a time where nothing is timed.

    Args:
        backend: The Keras backend that it trains with.
        log: The file that its standard error goes to.
    """

    def __init__(self, backend: str, log: Path) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment,
                text=True,
            )
        self._log = log

    def ask(self, request: str, system: str, **arguments: Any) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        line = json.dumps({"request": request, "system": system, **arguments})
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() says what happened

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest open request."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Failed(f"the worker ended with {code}, see {self._log}")
        answer = json.loads(line)
        if "absent" in answer:
            raise Absent(answer["absent"])
        if "error" in answer:
            raise Failed(_short(answer["error"]))
        return answer

    def close(self) -> None:
        """End the worker: the end of its input ends its loop."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _short(message: str) -> str:
    """The message on one line, without Keras's colors; the log has it all."""
    plain = re.sub("\x1b\\[[0-9;]*m", "", message)
    return textwrap.shorten(plain, 240, placeholder=" ...")
