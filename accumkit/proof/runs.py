"""Trains one model in several ways from one start, in one sample order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import accumkit
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)
from accumkit.proof.data import Data


class Net(accumkit.AccumulationMixin, keras.Sequential):
    """The model of the accumulated run; the other runs are stock Keras."""


class Counting(keras.Sequential):
    """The same with an `AccumulationOptimizer`.

    The last micro-batch of an epoch may be smaller than the others, which the
    optimizer must be told.
    """

    def train_step(self, *args: Any) -> Any:
        """Runs one batch, as Keras does."""
        x, _ = args[-1]
        optimizer: Any = self.optimizer
        with optimizer.micro_batch_weight(keras.ops.shape(x)[0]):
            return super().train_step(*args)


@dataclasses.dataclass
class Run:
    """One training run.

    Attributes:
        name: What tables and legends call it.
        batch_size: Samples of one batch of `fit`.
        accumulation_steps: Batches of a full window.
        rows: A dict per epoch: `optimizer_steps` and `samples` so far, what
            Keras logged, and the `seconds` so far.
        weights: All weights as one vector, at the start and after each epoch.
    """

    name: str
    batch_size: int
    accumulation_steps: int = 1
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    weights: list[np.ndarray] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Proof:
    """The runs that are compared.

    Attributes:
        micro: The micro-batch alone.
        accumulated: The micro-batch accumulated.
        large: The large batch.
        reordered: The large batch again, the samples of each batch in reverse
            order: the same sums in exact arithmetic, so that its distance
            from `large` is what rounding alone makes of this training.
    """

    micro: Run
    accumulated: Run
    large: Run
    reordered: Run

    @property
    def shown(self) -> tuple[Run, Run, Run]:
        """The runs of the table, the picture and the file."""
        return self.micro, self.accumulated, self.large

    def distances(self, run: Run) -> list[float]:
        """How far a run is from the large batch, after each epoch.

        Args:
            run: One of the runs.

        Returns:
            |w - w_large| / |w_large - w_start| for each epoch.
        """
        large = self.large.weights
        return [
            float(norm(ours - theirs) / norm(theirs - large[0]))
            for ours, theirs in zip(run.weights[1:], large[1:], strict=True)
        ]


def norm(vector: np.ndarray) -> float:
    """Returns the Euclidean length of a vector."""
    return float(np.linalg.norm(vector))


def train(
    data: Data,
    batch_size: int,
    accumulation_steps: int,
    epochs: int,
    learning_rate: float,
    seed: int,
    report: Callable[[Run], None],
    way: str = "mixin",
) -> Proof:
    """Trains all runs.

    Args:
        data: What to train on.
        batch_size: Samples of a micro-batch.
        accumulation_steps: Micro-batches of a full window.
        epochs: Number of epochs.
        learning_rate: Of Adam, the same for all runs.
        seed: Of the initial weights and the sample orders.
        report: Called with the run after each of its epochs.
        way: What accumulates, one of `WAYS`. Defaults to `"mixin"`.

    Returns:
        The runs.
    """
    keras.utils.set_random_seed(seed)
    start = _model(keras.Sequential, data).get_weights()
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(data.x_train)) for _ in range(epochs)]
    effective = batch_size * accumulation_steps
    proof = Proof(
        Run("micro-batch", batch_size),
        Run("accumulated", batch_size, accumulation_steps),
        Run("large batch", effective),
        Run("large batch, reordered", effective),
    )
    for run in (proof.micro, proof.accumulated, proof.large, proof.reordered):
        model = _compiled(run, data, learning_rate, way)
        model.set_weights(start)
        run.weights.append(_vector(model))
        for epoch, order in enumerate(orders):
            if run is proof.reordered:
                order = _reversed_batches(order, effective)
            _epoch(run, model, data, epoch, order)
            report(run)
    return proof


def _model(kind: type[keras.Sequential], data: Data) -> Any:
    return kind(
        [
            keras.Input(data.x_train.shape[1:]),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(data.classes, activation="softmax"),
        ]
    )


def _compiled(run: Run, data: Data, learning_rate: float, way: str) -> Any:
    kind: type[keras.Sequential] = keras.Sequential
    optimizer: Any = keras.optimizers.Adam(learning_rate)
    options = {}
    if run.accumulation_steps > 1 and way == "mixin":
        kind = Net
        options = {"accumulation_steps": run.accumulation_steps}
    elif run.accumulation_steps > 1:
        kind = Counting
        optimizer = accumkit.AccumulationOptimizer(
            optimizer, run.accumulation_steps, weighting="exact"
        )
    model = _model(kind, data)
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **options,
    )
    return model


def _epoch(
    run: Run, model: Any, data: Data, epoch: int, order: np.ndarray
) -> None:
    before = run.rows[-1] if run.rows else {"samples": 0, "seconds": 0.0}
    counting = isinstance(model, Counting)
    callbacks = [OptimizerRemainder()] if counting else []
    clock = time.perf_counter()
    # A `fit` for each epoch, so that all runs can be given the same order.
    history = model.fit(
        data.x_train[order],
        data.y_train[order],
        batch_size=run.batch_size,
        shuffle=False,
        initial_epoch=epoch,
        epochs=epoch + 1,
        validation_data=(data.x_test, data.y_test),
        validation_batch_size=1000,
        callbacks=callbacks,
        verbose=0,
    )
    seconds = time.perf_counter() - clock
    logs = {name: values[0] for name, values in history.history.items()}
    run.rows.append(
        {
            "epoch": epoch,
            "optimizer_steps": int(model.optimizer.iterations),
            "samples": before["samples"] + len(order),
            **logs,
            "seconds": before["seconds"] + seconds,
        }
    )
    run.weights.append(_vector(model))


def _vector(model: Any) -> np.ndarray:
    weights = [np.ravel(weight) for weight in model.get_weights()]
    return np.concatenate(weights).astype("float64")


def _reversed_batches(order: np.ndarray, size: int) -> np.ndarray:
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return np.concatenate([batch[::-1] for batch in batches])
