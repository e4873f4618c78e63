"""How `python -m accumkit` starts: before Keras, which asks for a framework.

Python imports a package before it runs its `__main__`, and whoever imports
Keras has chosen the backend. So in the main job `accumkit/__init__.py` leaves
that to `__main__`, which first reads its arguments (`--help` needs nothing).
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")
"""Those that accumkit has; Keras's own default first."""


def main_job_starts() -> bool:
    """Whether it is `python -m accumkit` that imports the package now."""
    # Until Python has found what `-m` names, that is its program.
    if sys.argv[:1] != ["-m"]:
        return False
    named = sys.orig_argv[-len(sys.argv)]
    return bool(re.fullmatch(r"(-\w*m)?accumkit(\.__main__)?", named))


def choose_backend() -> str:
    """Chooses a backend that is installed, unless the user has chosen one.

    Returns:
        What chose it, the end of a sentence.

    Raises:
        ImportError: If the chosen one, or all, are missing.
    """
    if "keras" in sys.modules:
        return ""
    installed = [name for name in BACKENDS if _is_installed(name)]
    wanted = os.environ.get("KERAS_BACKEND")
    path = _keras_json()
    name, why = choice(wanted, _named_in(path), str(path), installed)
    os.environ["KERAS_BACKEND"] = name
    return why


def choice(
    wanted: str | None, noted: str | None, path: str, installed: Collection[str]
) -> tuple[str, str]:
    """Returns the backend to take and what chose it.

    Args:
        wanted: What `KERAS_BACKEND` says, if anything.
        noted: What Keras's file says, if anything.
        path: The path of that file.
        installed: The backends that can be imported, the best first.

    Raises:
        ImportError: If the chosen one, or all, are missing.
    """
    if wanted:
        if wanted not in installed:
            others = " or ".join(installed) or "one of " + ", ".join(BACKENDS)
            rule = (
                f"it is not installed. Install it: {_install(wanted)}, or set "
                if wanted in BACKENDS
                else "accumkit does not support it. Set "
            )
            raise ImportError(
                f"`KERAS_BACKEND` is {wanted!r}, but {rule}it to {others}."
            )
        return wanted, ", as KERAS_BACKEND says"
    # Keras writes that file by itself, with "tensorflow" in it, so one that
    # is missing was hardly anybody's wish.
    if noted in installed:
        return str(noted), f", as {path} says"
    for name in installed:
        return name, ", which is installed; KERAS_BACKEND chooses another"
    raise ImportError(
        f"none of {', '.join(BACKENDS)} is installed. Install one: "
        f"{_install('jax')}"
    )


def described(why: str) -> str:
    """Returns a line that says which Keras runs on what.

    Args:
        why: What `choose_backend` returned.
    """
    import keras

    return f"Keras {keras.__version__} on {keras.config.backend()}{why}"


def _install(backend: str) -> str:
    return f'pip install "accumkit[{backend}]"'


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # A folder of that name, without a package in it, has no origin.
    return spec is not None and spec.origin is not None


def _keras_json() -> Path:
    """Keras's own file, looked for where Keras looks."""
    home = os.environ.get("KERAS_HOME")
    if home is None:
        base = os.path.expanduser("~")
        home = os.path.join(
            base if os.access(base, os.W_OK) else "/tmp", ".keras"
        )
    return Path(os.path.expanduser(os.path.join(home, "keras.json")))


def _named_in(path: Path) -> str | None:
    try:
        return json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        return None
