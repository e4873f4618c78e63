"""`EffectiveStepLogger`: what happened at each optimizer step."""

import os
import time
from typing import TYPE_CHECKING, Any

import keras

from accumkit import checks
from accumkit.backends import processes
from accumkit.callbacks.model_access import ModelCallback
from accumkit.callbacks.step_counts import StepCounts
from accumkit.callbacks.step_log import CsvLog, MemoryLog, TensorBoardLog
from accumkit.recording import WindowReader

if TYPE_CHECKING:
    import pandas

# How long rows may lie on the device; reading them costs a wait for it.
_SECONDS = 1.0
_CAPACITY = 1024


class EffectiveStepLogger(ModelCallback):
    """Logs optimizer steps: one row each, and their number in the epoch's logs.

    The train step notes each window as it closes, so that the rows are right
    with `steps_per_execution`, in both modes and under every remainder
    policy, and nothing waits for the device per micro-batch: rows are fetched
    about once a second and at the end of an epoch. A window that a
    `LossScaleOptimizer` skips is no optimizer step and has no row.

    Into the epoch's logs it puts `optimizer_steps` and `micro_batches` (both
    counted from the beginning), `effective_batch_size` (mean samples of an
    optimizer step in the epoch) and `learning_rate`, as they are when the
    epoch ends and before any callback's `on_epoch_end`: wherever it stands in
    the list, `CSVLogger`, `ModelCheckpoint` and the `History` find them. Only
    in a training loop of your own, and inside a callback that calls others,
    must it stand in front of those that read the logs.

    A run that ends in an exception or with Ctrl-C leaves the rows of all
    windows that closed before it, except on JAX where a train step itself
    fails: that takes the model's state along, and with it the rows of the
    last second.

    A row costs 64 bytes of memory, with a `csv_path` too, so that `frame` is
    complete: a million optimizer steps cost 64 MB. `every=100` takes one
    hundredth.

    Of several processes that train one model, only the first writes files;
    each has its `frame`.

    Example:

    ```python
    log = accumkit.callbacks.EffectiveStepLogger(csv_path="steps.csv")
    model.fit(x, y, batch_size=16, callbacks=[log])
    log.frame.plot("optimizer_step", "loss")
    ```

    Args:
        csv_path: A CSV file to which the rows are appended as they come.
        tensorboard_dir: A directory for TensorBoard, on the axis of optimizer
            steps. Needs the extra `accumkit[tensorboard]`.
        every: Int ≥ 1, a row for every so many optimizer steps. Defaults to
            `1`.
        gradient_norm: Bool, whether to add the norm of the gradient that the
            optimizer was given (before its clipping, without the loss scale).
            It costs one pass over the gradients. Defaults to `False`.
        verbose: 0 or 1, whether to print the rows. Defaults to `0`.

    Attributes:
        frame: A pandas `DataFrame`, one row per logged optimizer step:
            `optimizer_step` (int, from 1, going on over several `fit`s),
            `epoch` (int, from 0), `micro_batches` (int, all so far),
            `samples` (int, of the window), `learning_rate` (float, the rate
            that the step used), `loss` (float, of the window: the mean with
            the weights that its gradients have), `gradient_norm` (float, NaN
            if not asked for), `seconds` (float, since `fit` began;
            interpolated between two readings).

    Raises:
        TypeError: If `every` is no integer; in `fit` for a model without
            `AccumulationMixin`.
        ValueError: If `every` is below 1.
        ImportError: If `tensorboard_dir` is given and tensorboard is missing.
    """

    def __init__(
        self,
        csv_path: str | os.PathLike[str] | None = None,
        tensorboard_dir: str | os.PathLike[str] | None = None,
        every: int = 1,
        gradient_norm: bool = False,
        verbose: int = 0,
    ):
        super().__init__()
        self.csv_path = csv_path
        self.tensorboard_dir = tensorboard_dir
        self.every = checks.count("every", every)
        self.gradient_norm = bool(gradient_norm)
        self.verbose = verbose
        self._rows = MemoryLog()
        self._logs: list[Any] = []
        self._capacity = _CAPACITY
        self._reader: Any = None
        self._counts = StepCounts()
        self._counted = False
        if tensorboard_dir is not None:
            TensorBoardLog(tensorboard_dir).close()

    @property
    def frame(self) -> "pandas.DataFrame":
        """The rows so far, one per logged optimizer step."""
        return self._rows.frame()

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts recording."""
        self._require_mixin("reads the windows")
        model = self._owner
        per_call: Any = getattr(model, "steps_per_execution", 1)
        self._batches_per_call = int(per_call)
        self._capacity = max(_CAPACITY, 2 * self._batches_per_call)
        model._record_windows(self.gradient_norm, self._capacity)
        self._logs = []
        writes = processes.is_first(model)
        if writes and self.csv_path is not None:
            self._logs.append(CsvLog(self.csv_path))
        if writes and self.tensorboard_dir is not None:
            self._logs.append(TensorBoardLog(self.tensorboard_dir))
        self._begun = self._read = time.perf_counter()
        self._calls = 0
        self._counted = False

    def _count(self) -> None:
        """Finds out where to go on counting.

        In the first epoch, when every callback's `on_train_begin` is done:
        `BackupAndRestore` may have put back an earlier state in its own.
        """
        counts = self._counts
        counts.optimizer_step = self._owner.optimizer_steps
        recorder = self._owner._accumulation.recorder
        if self._reader is None or self._reader.recorder is not recorder:
            self._reader = WindowReader(recorder)
        # What nobody read: windows of `train_on_batch`, and one left open by
        # an exception.
        windows, dropped = self._reader.take()
        if counts.micro_batches is not None:
            unread = sum(round(w["micro_batches"]) for w in windows)
            counts.micro_batches += unread + dropped
        elif self.csv_path is not None:
            counts.micro_batches = CsvLog.micro_batches_at(
                self.csv_path, counts.optimizer_step
            )
        else:
            counts.micro_batches = 0
        self._counted = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the epoch's counts."""
        if not self._counted:
            self._count()
        self._counts.begin_epoch(epoch)
        self._logged = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Fetches rows if enough time has passed or the ring may be full.

        Not `on_train_batch_end`: overriding that makes Keras wait for the
        logs of every batch.
        """
        self._calls += 1
        batches = (self._calls + 1) * self._batches_per_call
        if (
            batches >= self._capacity
            or time.perf_counter() - self._read > _SECONDS
        ):
            self._fetch()

    def on_epoch_logs(self, epoch: int, logs: Any = None) -> None:
        """Adds the counts to the epoch's logs, before anybody reads them.

        Args:
            epoch: The epoch, counted from 0.
            logs: The epoch's logs.
        """
        self._fetch()
        self._logged = True
        if logs is None:
            return
        rate = keras.ops.convert_to_numpy(
            keras.ops.convert_to_tensor(self._owner.optimizer.learning_rate)
        )
        counts, opened = self._counts, self._owner.open_micro_batches
        logs["optimizer_steps"] = counts.optimizer_step
        # Under "carry" the open window's have been seen as well.
        logs["micro_batches"] = counts.micro_batches + opened
        logs["effective_batch_size"] = counts.effective_batch_size
        logs["learning_rate"] = float(rate)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the counts to the epoch's logs, unless `fit` has seen to it."""
        if not self._logged:
            self.on_epoch_logs(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Fetches the last rows."""
        if self._counted:
            self._fetch()

    def on_fit_exit(self) -> None:
        """Fetches the rows of an interrupted run and closes the files."""
        logs = self._logs
        try:
            if self._counted:
                self._fetch()
        finally:
            self._logs, self._counted = [], False
            for log in logs:
                log.close()

    def _fetch(self) -> None:
        _ = self.model  # its variables are to be read
        now, then = time.perf_counter(), self._read
        windows, dropped = self._reader.take()
        rows = self._counts.rows(windows, then - self._begun, now - self._begun)
        self._counts.micro_batches += dropped
        self._read, self._calls = now, 0
        rows = [r for r in rows if r["optimizer_step"] % self.every == 0]
        if not self.gradient_norm:
            rows = [{**row, "gradient_norm": float("nan")} for row in rows]
        for log in (self._rows, *self._logs):
            log.write(rows)
        if self.verbose:
            for row in rows:
                print(
                    "optimizer step {optimizer_step}: loss {loss:.4g}, "
                    "learning rate {learning_rate:.4g}, {samples} samples, "
                    "{micro_batches} micro-batches so far".format(**row)
                )
