"""Gradient accumulation for Keras 3, exactly as the large batch."""

from accumkit._version import __version__ as __version__
from accumkit.messages import AccumkitWarning as AccumkitWarning
from accumkit.mixin import AccumulationMixin as AccumulationMixin
from accumkit.windows import optimizer_steps as optimizer_steps

__all__ = [
    "AccumkitWarning",
    "AccumulationMixin",
    "optimizer_steps",
]
