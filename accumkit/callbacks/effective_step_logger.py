"""`EffectiveStepLogger`: what happened at each optimizer step."""

import os
import time
from typing import TYPE_CHECKING, Any

import keras

from accumkit import checks
from accumkit.callbacks.model_access import ModelCallback
from accumkit.callbacks.step_log import COLUMNS, CsvLog, TensorBoardLog

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
    optimizer step in the epoch) and `learning_rate`. Stand it in front of
    callbacks that read the logs, such as `CSVLogger`.

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
        self._rows: list[dict[str, Any]] = []
        self._logs: list[Any] = []
        self._recorder: Any = None
        self._optimizer_step = 0
        self._micro_batches: int | None = None
        if tensorboard_dir is not None:
            TensorBoardLog(tensorboard_dir).close()

    @property
    def frame(self) -> "pandas.DataFrame":
        """The rows so far, one per logged optimizer step."""
        import pandas as pd

        return pd.DataFrame(self._rows, columns=list(COLUMNS))

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts recording."""
        self._require_mixin("reads the windows")
        model = self._owner
        per_call: Any = getattr(model, "steps_per_execution", 1)
        self._batches_per_call = int(per_call)
        capacity = max(_CAPACITY, 2 * self._batches_per_call)
        self._recorder = model._record_windows(self.gradient_norm, capacity)
        self._recorder.take()  # what others left unread
        self._optimizer_step = model.optimizer_steps
        self._logs = []
        if self.csv_path is not None:
            log = CsvLog(self.csv_path)
            if self._micro_batches is None:
                self._micro_batches = log.micro_batches_at(self._optimizer_step)
            self._logs.append(log)
        if self.tensorboard_dir is not None:
            self._logs.append(TensorBoardLog(self.tensorboard_dir))
        self._micro_batches = self._micro_batches or 0
        self._begun = self._read = time.perf_counter()
        self._calls = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the epoch's counts."""
        self._epoch = epoch
        self._epoch_steps = 0
        self._epoch_samples = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Fetches rows if enough time has passed or the ring may be full.

        Not `on_train_batch_end`: overriding that makes Keras wait for the
        logs of every batch.
        """
        self._calls += 1
        batches = (self._calls + 1) * self._batches_per_call
        if (
            batches >= self._recorder.capacity
            or time.perf_counter() - self._read > _SECONDS
        ):
            self._fetch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the counts to the epoch's logs."""
        self._fetch()
        if logs is None:
            return
        rate = keras.ops.convert_to_numpy(
            keras.ops.convert_to_tensor(self._owner.optimizer.learning_rate)
        )
        logs["optimizer_steps"] = self._optimizer_step
        # Under "carry" the open window's have been seen as well.
        opened = self._owner.open_micro_batches
        logs["micro_batches"] = self._micro_batches + opened
        logs["effective_batch_size"] = (
            self._epoch_samples / self._epoch_steps
            if self._epoch_steps
            else float("nan")
        )
        logs["learning_rate"] = float(rate)

    def on_train_end(self, logs: Any = None) -> None:
        """Fetches the last rows."""
        self._fetch()

    def on_fit_exit(self) -> None:
        """Closes the files, also after an exception."""
        for log in self._logs:
            log.close()
        self._logs = []

    def _fetch(self) -> None:
        recorded = self.model._accumulation.recorder
        now, then = time.perf_counter(), self._read
        windows, dropped = recorded.take()
        total = sum(w["micro_batches"] for w in windows) or 1
        rows, done = [], 0
        for window in windows:
            done += window["micro_batches"]
            self._micro_batches += round(window["micro_batches"])
            if not window["stepped"]:
                continue
            self._optimizer_step += 1
            self._epoch_steps += 1
            self._epoch_samples += window["samples"]
            if self._optimizer_step % self.every:
                continue
            norm = window["gradient_norm"]
            seconds = then + (now - then) * done / total - self._begun
            rows.append(
                {
                    "optimizer_step": self._optimizer_step,
                    "epoch": self._epoch,
                    "micro_batches": self._micro_batches,
                    "samples": round(window["samples"]),
                    "learning_rate": window["learning_rate"],
                    "loss": window["loss"],
                    "gradient_norm": (
                        norm if self.gradient_norm else float("nan")
                    ),
                    "seconds": seconds,
                }
            )
        self._micro_batches += dropped
        self._read, self._calls = now, 0
        self._rows += rows
        for log in self._logs:
            log.write(rows)
        if self.verbose:
            for row in rows:
                print(
                    "optimizer step {optimizer_step}: loss {loss:.4g}, "
                    "learning rate {learning_rate:.4g}, {samples} samples, "
                    "{micro_batches} micro-batches so far".format(**row)
                )
