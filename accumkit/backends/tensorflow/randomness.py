"""Random numbers of the framework's own: Keras takes none of them here.

It draws from states that are variables.
"""

from typing import Any


def state() -> Any:
    """Nothing to keep."""


def put_back(value: Any) -> None:
    """Nothing to put back."""
