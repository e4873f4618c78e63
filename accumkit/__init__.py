"""Gradient accumulation for Keras 3, exactly as the large batch."""

from accumkit import _start as _start
from accumkit._version import __version__ as __version__

# `python -m accumkit` imports the rest when it has chosen a backend.
if not _start.main_job_starts():
    from accumkit import callbacks as callbacks
    from accumkit import plotting as plotting
    from accumkit.batch_normalization_recomputation import (
        recompute_batch_normalization as recompute_batch_normalization,
    )
    from accumkit.messages import AccumkitWarning as AccumkitWarning
    from accumkit.mixin import AccumulationMixin as AccumulationMixin
    from accumkit.optimizer import (
        AccumulationOptimizer as AccumulationOptimizer,
    )
    from accumkit.rescaled_schedule import RescaledSchedule as RescaledSchedule
    from accumkit.windows import optimizer_steps as optimizer_steps

__all__ = [
    "AccumkitWarning",
    "AccumulationMixin",
    "AccumulationOptimizer",
    "RescaledSchedule",
    "callbacks",
    "optimizer_steps",
    "plotting",
    "recompute_batch_normalization",
]
