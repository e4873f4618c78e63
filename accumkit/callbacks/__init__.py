"""Callbacks for training with accumulated gradients."""

from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder as OptimizerRemainder,
)
from accumkit.callbacks.accumulation_scheduler import (
    AccumulationScheduler as AccumulationScheduler,
)
from accumkit.callbacks.batch_normalization_check import (
    BatchNormalizationCheck as BatchNormalizationCheck,
)
from accumkit.callbacks.batch_normalization_recomputation import (
    BatchNormalizationRecomputation as BatchNormalizationRecomputation,
)
from accumkit.callbacks.effective_step_logger import (
    EffectiveStepLogger as EffectiveStepLogger,
)
from accumkit.callbacks.learning_rate_schedule_adjuster import (
    LearningRateScheduleAdjuster as LearningRateScheduleAdjuster,
)

__all__ = [
    "AccumulationScheduler",
    "BatchNormalizationCheck",
    "BatchNormalizationRecomputation",
    "EffectiveStepLogger",
    "LearningRateScheduleAdjuster",
    "OptimizerRemainder",
]
