"""`LearningRateScheduleAdjuster`: the unit in which a schedule was sized."""

from typing import Any

from accumkit import checks, keras_internals
from accumkit.callbacks.model_access import ModelCallback
from accumkit.mixin import AccumulationMixin
from accumkit.rescaled_schedule import RescaledSchedule

_UNITS = ("micro_batches", "optimizer_steps")


class LearningRateScheduleAdjuster(ModelCallback):
    """Runs a schedule over its whole length, whatever it was sized in.

    With `AccumulationMixin` an optimizer counts optimizer steps, so a
    schedule sized in micro-batches (`decay_steps=epochs * len(dataset)`) would
    end after 1/N of its length. This callback lets optimizer step k see
    `schedule(k · N)`. When N changes it goes on from where it is.

    With Keras's own `gradient_accumulation_steps` on a plain model schedules
    count micro-batches; there `written_in="optimizer_steps"` lets micro-batch
    i see `schedule(i // N)`.

    The schedule is replaced by a `RescaledSchedule` around it, in the
    optimizer or inside a `LossScaleOptimizer`; your object stays as it is,
    and so does the number of the optimizer's variables. The replacement stays
    after training, so that a saved model goes on rightly, and is never
    applied twice. A rate that is no schedule is left alone.

    Example:

    ```python
    schedule = keras.optimizers.schedules.CosineDecay(
        1e-3, decay_steps=epochs * len(dataset)
    )
    model.compile(keras.optimizers.Adam(schedule), "mse", accumulation_steps=8)
    adjust = accumkit.callbacks.LearningRateScheduleAdjuster()
    model.fit(dataset, epochs=epochs, callbacks=[adjust])
    ```

    Args:
        written_in: `"micro_batches"` or `"optimizer_steps"`, what a step of
            the schedule means. Defaults to `"micro_batches"`.

    Raises:
        ValueError: If `written_in` is unknown.
    """

    def __init__(self, written_in: str = "micro_batches"):
        super().__init__()
        self.written_in = checks.choice("written_in", written_in, _UNITS)
        self._n: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Adjusts the schedule."""
        self._n = None
        self._follow()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Follows N when it has changed."""
        self._follow()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Follows N when it has changed."""
        self._follow()

    def _follow(self) -> None:
        own = isinstance(self._owner, AccumulationMixin)
        if own:
            n = self._owner.accumulation_steps
        else:
            n = checks.builtin_steps(self._owner.optimizer)
        if n == self._n:
            return
        begins, self._n = self._n is None, n
        optimizer = keras_internals.scheduled_optimizer(self._owner.optimizer)
        if optimizer is None:
            return
        model = self.model  # its counters are to be read
        schedule = keras_internals.schedule_of(optimizer)
        if own and self.written_in == "micro_batches":
            # A schedule met for the first time has not run on another clock.
            rescaled = isinstance(schedule, RescaledSchedule)
            step = 0 if begins and not rescaled else model.optimizer_steps
            new = RescaledSchedule.following(schedule, n, 1, step)
        elif not own and self.written_in == "optimizer_steps":
            new = RescaledSchedule.following(schedule, 1, n, 0)
        else:
            new = RescaledSchedule.original(schedule)
        if new is schedule:
            return
        optimizer.learning_rate = new
        # The old schedule is part of what was traced.
        model.make_train_function(force=True)
