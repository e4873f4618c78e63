"""Reading what is private, with an error that names the Keras that lacks it.

Instead of an `ImportError` or `AttributeError` from somewhere inside.
"""

import importlib
from typing import Any

import keras

from accumkit._version import __version__


def _missing(name: str) -> str:
    return (
        f"accumkit {__version__} builds on a private part of Keras, `{name}`, "
        f"that Keras {keras.__version__} does not have. Install a version of "
        "Keras that accumkit's README lists as tested, or a newer accumkit."
    )


def imported(module: str, name: str) -> Any:
    """Imports a private name; says which Keras lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(_missing(f"{module}.{name}")) from error


def private(owner: Any, name: str) -> Any:
    """Reads a private attribute; says which Keras lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        # Not an AttributeError, which `hasattr` and properties swallow.
        raise RuntimeError(_missing(f"{type(owner).__name__}.{name}")) from (
            error
        )
