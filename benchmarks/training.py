"""One system on one workload: compiled, timed, and run for its weights."""

from __future__ import annotations

import gc
import hashlib
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks import models
from benchmarks.systems import System
from benchmarks.workloads import Workload

WARM_UP_WINDOWS = 2
CHECK_STEPS = 3


def unavailable(system: System) -> str | None:
    """Why this accumkit has no such system, or None."""
    if system.accumulates in (None, "keras"):
        return None
    import accumkit

    if system.accumulates == "optimizer" and not hasattr(
        accumkit, "AccumulationOptimizer"
    ):
        return "this accumkit has no AccumulationOptimizer"
    return None


class Trial:
    """A system at work on a workload.

    Args:
        workload: What is trained.
        system: How it is trained.
        jit: Whether to ask for XLA; otherwise Keras decides.
    """

    def __init__(self, workload: Workload, system: System, jit: bool) -> None:
        self._workload = workload
        self._system = system
        self._jit = jit
        self._model = self._compiled("adam", 1e-3)
        self._windows, self._epochs = WARM_UP_WINDOWS, 1
        self._data = models.data(workload, self._windows)

    def warm_up(self, calls: int) -> None:
        """Trace, and train for the same few windows in every system.

        Args:
            calls: Calls of ``fit``. The second one is free of what only a
                first one does.
        """
        for _ in range(calls):
            self._timed()

    def lengthen(self, seconds: float) -> int:
        """Make a measurement at least so long; return its windows."""
        while seconds and self._timed() < seconds:
            if self._windows < self._workload.windows:
                self._windows = min(2 * self._windows, self._workload.windows)
                self._data = models.data(self._workload, self._windows)
            else:
                self._epochs *= 2
        return self._windows * self._epochs

    def measure(self, tidy: bool) -> float:
        """Seconds per sample of one measurement.

        Args:
            tidy: Whether to collect the garbage of earlier calls first, so
                that it isn't done on this one's time.
        """
        if tidy:
            gc.collect()
        samples = self._windows * self._epochs * self._workload.large_batch
        return self._timed() / samples

    def weights_after_steps(self, path: Path) -> str:
        """Take a few steps of SGD from the start, and store the weights.

        SGD, as Adam divides a gradient by its own size and so turns the
        rounding of one that is nearly 0 into a whole step.

        Returns:
            A digest of the weights before the first step.
        """
        model = self._compiled("sgd", self._workload.check_rate)
        before = _weights(model)
        self._fit(model, *models.data(self._workload, CHECK_STEPS))
        after = _weights(model)
        arrays: dict[str, Any] = {
            **{f"before_{i}": value for i, value in enumerate(before)},
            **{f"after_{i}": value for i, value in enumerate(after)},
        }
        np.savez(path, **arrays)
        digest = hashlib.sha256()
        for value in before:
            digest.update(value.tobytes())
        return digest.hexdigest()

    def _timed(self) -> float:
        clock = _Clock()
        self._fit(self._model, *self._data, epochs=self._epochs, clock=clock)
        return clock.seconds

    def _fit(
        self,
        model: keras.Model,
        x: Any,
        y: np.ndarray,
        epochs: int = 1,
        clock: keras.callbacks.Callback | None = None,
    ) -> None:
        batch = (
            self._workload.large_batch
            if self._system.draws == "window"
            else self._workload.micro_batch
        )
        model.fit(
            x,
            y,
            batch_size=batch,
            epochs=epochs,
            verbose=0,
            shuffle=False,
            callbacks=[clock] if clock else None,
        )

    def _compiled(self, optimizer: str, rate: float) -> keras.Model:
        inputs, outputs = models.graph(self._workload)
        system, count = self._system, self._workload.accumulation_steps
        in_optimizer: dict[str, Any] = {}
        options: dict[str, Any] = {"jit_compile": True} if self._jit else {}
        kind = keras.Model
        if system.accumulates == "keras":
            in_optimizer["gradient_accumulation_steps"] = count
        elif system.accumulates == "across":
            kind = _accumulating_model()
            options["accumulation_steps"] = count
        elif system.accumulates == "within":
            kind = _accumulating_model()
            options["micro_batch_size"] = self._workload.micro_batch
            if self._workload.couples:
                options["loss_over"] = "batch"
        if system.one_execution:
            options["steps_per_execution"] = count
        rule = keras.optimizers.get(
            {
                "class_name": optimizer,
                "config": {"learning_rate": rate, **in_optimizer},
            }
        )
        if system.accumulates == "optimizer":
            import accumkit

            rule = accumkit.AccumulationOptimizer(rule, count)
        model = kind(inputs, outputs)
        model.compile(
            optimizer=rule,
            loss=models.loss(self._workload),
            metrics=["accuracy"],
            **options,
        )
        return model


class _Clock(keras.callbacks.Callback):
    """Times the epochs, without what ``fit`` does once, before and after.

    That takes a tenth of a second at times, nothing in a training of minutes
    but much in a measurement of one second. The last epoch's end waits for
    the loss, and so for the last step, on every backend.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_train_end(self, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._start


def _accumulating_model() -> type[keras.Model]:
    import accumkit

    class Model(accumkit.AccumulationMixin, keras.Model):
        """A functional model that accumulates."""

    return Model


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [
        np.array(keras.ops.convert_to_numpy(variable))
        for variable in model.trainable_variables
    ]
