"""`AccumulationScheduler`: N by epoch or by optimizer step."""

from collections.abc import Callable, Mapping
from typing import Any

from accumkit import windows
from accumkit.callbacks.model_access import ModelCallback


class AccumulationScheduler(ModelCallback):
    """Changes `accumulation_steps` during training, between windows.

    Uses: warming up the batch size, and raising it where one would otherwise
    lower the learning rate. `accumkit.optimizer_steps` takes the same
    schedule and says how many optimizer steps a run will have.

    Example:

    ```python
    warm_up = accumkit.callbacks.AccumulationScheduler({0: 1, 5: 4})
    model.fit(x, y, epochs=10, callbacks=[warm_up])
    ```

    Args:
        schedule: A dict `{epoch: N}`, N from that epoch on (epochs counted
            from 0, epoch 0 present), or a function `N = f(optimizer_step)`
            of the number of optimizer steps taken so far. N is constant
            within a window. A function is asked when a window may have
            closed, between two executions: with `steps_per_execution > 1`
            all windows of one execution have the same N.

    Raises:
        TypeError: If `schedule` is neither or N is no integer; in `fit` for a
            model without `AccumulationMixin`.
        ValueError: If there is no entry for epoch 0, or an N is below 1.

    Reference:

    - [Smith et al., 2018](https://arxiv.org/abs/1711.00489): "Don't Decay the
      Learning Rate, Increase the Batch Size".
    """

    def __init__(self, schedule: Mapping[int, int] | Callable[[int], int]):
        super().__init__()
        self.schedule = schedule
        self._steps_at = windows.steps_function(schedule)
        self._by_step = callable(schedule)

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the model."""
        self._require_mixin("sets `accumulation_steps`")
        self._wait = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the epoch's N."""
        self._epoch = epoch
        self._update()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Asks a function of the optimizer step, once per window."""
        if not self._by_step:
            return
        self._wait -= 1
        if self._wait <= 0:
            self._update()

    def _update(self) -> None:
        model = self.model  # the counters are to be read
        steps = model.optimizer_steps if self._by_step else 0
        n = self._steps_at(self._epoch, steps)
        if n != model.accumulation_steps:
            model.accumulation_steps = n
        # A window of n batches cannot close sooner than that: until then the
        # device need not be asked.
        missing = n - model._accumulation.open_batch_count()
        self._wait = max(missing // int(model.steps_per_execution), 1)
