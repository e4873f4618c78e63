"""`RescaledSchedule`: a schedule on another clock."""

from typing import Any

import keras
from keras import ops

from accumkit import checks


@keras.saving.register_keras_serializable(package="accumkit")
class RescaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Runs a schedule a whole number of times faster or slower.

    At step k it has the rate `schedule(start_position + (k - start_step) *
    multiply // divide)`. `LearningRateScheduleAdjuster` makes one; it can be
    used alone as well, and is saved with the optimizer.

    Example:

    ```python
    # Sized in micro-batches, used with accumulation_steps=8:
    rate = accumkit.RescaledSchedule(
        keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=8000),
        multiply=8,
    )
    ```

    Args:
        schedule: A `LearningRateSchedule`. It is called, never changed.
        multiply: Int ≥ 1, steps of the schedule per step. Defaults to `1`.
        divide: Int ≥ 1, steps per step of the schedule. Defaults to `1`.
        start_step: Int ≥ 0, the step from which it counts. Defaults to `0`.
        start_position: Int ≥ 0, the schedule's step there. Defaults to `0`.

    Raises:
        TypeError: If `schedule` is no `LearningRateSchedule`, or a number is
            no integer.
        ValueError: If a number is too small.
    """

    def __init__(
        self,
        schedule: Any,
        multiply: int = 1,
        divide: int = 1,
        start_step: int = 0,
        start_position: int = 0,
    ):
        super().__init__()
        if not isinstance(
            schedule, keras.optimizers.schedules.LearningRateSchedule
        ):
            raise TypeError(
                "`schedule` must be a keras.optimizers.schedules."
                f"LearningRateSchedule. Received: schedule={schedule!r}. A "
                "constant rate needs no rescaling."
            )
        self.schedule = schedule
        self.multiply = checks.count("multiply", multiply)
        self.divide = checks.count("divide", divide)
        self.start_step = checks.count("start_step", start_step, minimum=0)
        self.start_position = checks.count(
            "start_position", start_position, minimum=0
        )

    def __call__(self, step: Any) -> Any:
        """The rate at `step`.

        Args:
            step: Int or scalar integer tensor, as the optimizer counts.

        Returns:
            A scalar float tensor.
        """
        return self.schedule(self._position(step))

    def _position(self, step: Any) -> Any:
        passed = (step - self.start_step) * self.multiply
        if self.divide > 1:
            passed = ops.floor_divide(passed, self.divide)
        return passed + self.start_position

    @classmethod
    def following(
        cls, schedule: Any, multiply: int, divide: int, step: int
    ) -> Any:
        """Returns `schedule` on a new clock, going on from where it is.

        Args:
            schedule: A schedule, or a `RescaledSchedule` around one.
            multiply: As in the constructor.
            divide: As in the constructor.
            step: The step at which the new clock begins; 0 if it has always
                been that clock.

        Returns:
            The same object where nothing changes, else a new one.
        """
        if not isinstance(schedule, cls):
            if multiply == divide == 1:
                return schedule
            return cls(schedule, multiply, divide, step, step)
        if (schedule.multiply, schedule.divide) == (multiply, divide):
            return schedule
        position = int(schedule._position(step))
        return cls(schedule.schedule, multiply, divide, step, position)

    @classmethod
    def original(cls, schedule: Any) -> Any:
        """Returns the schedule inside, or `schedule` if there is none.

        Args:
            schedule: A schedule, or a `RescaledSchedule` around one.

        Returns:
            The schedule as its user made it.
        """
        return schedule.schedule if isinstance(schedule, cls) else schedule

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, the schedule serialized."""
        return {
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "multiply": self.multiply,
            "divide": self.divide,
            "start_step": self.start_step,
            "start_position": self.start_position,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "RescaledSchedule":
        """Makes one from `get_config`'s dict.

        Args:
            config: The dict.
            custom_objects: Classes of one's own, by name.
        """
        schedule = keras.saving.deserialize_keras_object(
            config["schedule"], custom_objects=custom_objects
        )
        return cls(**{**config, "schedule": schedule})
