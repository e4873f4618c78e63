"""From windows, as the train step noted them, to the rows of a step log."""

from typing import Any


class StepCounts:
    """Counts optimizer steps and micro-batches, over the run and an epoch.

    Attributes:
        optimizer_step: The last optimizer step.
        micro_batches: All so far; None before the first `fit`.
        samples: Of the epoch's optimizer steps.
        steps: The epoch's optimizer steps.
    """

    def __init__(self) -> None:
        self.optimizer_step = 0
        self.micro_batches: int | None = None
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Starts an epoch."""
        self._epoch = epoch
        self.steps = 0
        self.samples = 0.0

    @property
    def effective_batch_size(self) -> float:
        """Mean samples of an optimizer step in the epoch; NaN without one."""
        return self.samples / self.steps if self.steps else float("nan")

    def rows(
        self, windows: list[dict[str, float]], begin: float, end: float
    ) -> list[dict[str, Any]]:
        """Counts windows and returns a row for each that made a step.

        Args:
            windows: Rows of a `WindowRecorder`.
            begin: Seconds at the reading before, since `fit` began.
            end: Seconds now; rows are spread over the time between.
        """
        total = sum(w["micro_batches"] for w in windows) or 1
        rows, done = [], 0.0
        count = self.micro_batches or 0
        for window in windows:
            done += window["micro_batches"]
            count += round(window["micro_batches"])
            # A window that a `LossScaleOptimizer` skips is no step.
            if not window["stepped"]:
                continue
            self.optimizer_step += 1
            self.steps += 1
            self.samples += window["samples"]
            rows.append(
                {
                    "optimizer_step": self.optimizer_step,
                    "epoch": self._epoch,
                    "micro_batches": count,
                    "samples": round(window["samples"]),
                    "learning_rate": window["learning_rate"],
                    "loss": window["loss"],
                    "gradient_norm": window["gradient_norm"],
                    "seconds": begin + (end - begin) * done / total,
                }
            )
        self.micro_batches = count
        return rows
