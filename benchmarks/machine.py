"""Where a run took place: processor, versions and date."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "jax": ("jax",),
    "torch": ("torch",),
}


def describe(backend: str) -> dict[str, Any]:
    """The machine and the versions, for the report.

    The load says whether the machine was busy with something else.
    """
    versions = {"python": platform.python_version()}
    for name in ("keras", *_DISTRIBUTIONS[backend], "numpy", "accumkit"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def sentence(machine: dict[str, Any]) -> str:
    """The same on one line."""
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items()
    )
    return (
        f"{machine['date']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}, load {machine['load_before']} before; {versions}"
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
