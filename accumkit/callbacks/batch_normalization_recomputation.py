"""`BatchNormalizationRecomputation`: moving averages of the final weights."""

import hashlib
from typing import Any

import keras
from keras import ops

from accumkit import batch_normalization_recomputation, batch_statistics, checks

_WHEN = ("end", "epoch")


class BatchNormalizationRecomputation(keras.callbacks.Callback):
    """Recomputes BatchNormalization's moving averages while `fit` runs.

    It calls `accumkit.recompute_batch_normalization`, before the validation of
    an epoch, so that validation, checkpoints and whatever stops early see the
    recomputed averages. Training itself does not read them.

    Put it in front of callbacks that save, and behind an `EarlyStopping` that
    restores weights when training ends. For any Keras model.

    Example:

    ```python
    normalized = keras.layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(normalized))
    model.compile("adam", "mse")
    recomputation = accumkit.callbacks.BatchNormalizationRecomputation(x)
    model.fit(x, y, batch_size=4, callbacks=[recomputation])
    ```

    Args:
        x: Inputs, as `model.predict` takes them: arrays, nested ones, a
            dataset or a `PyDataset`. Not a generator, which runs out.
        batch_size: Int ≥ 1, samples in a forward pass, for arrays. Defaults to
            `32`.
        steps: Int ≥ 1 or None, how many batches to use. Defaults to `None`,
            all.
        when: `"end"`: once, in the last epoch, or when training stops before.
            `"epoch"`: in each epoch. Defaults to `"end"`.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 1, `when` is unknown or `x` is a
            generator; in `fit`, if no layer is active.
    """

    def __init__(
        self,
        x: Any,
        batch_size: int = 32,
        steps: int | None = None,
        when: str = "end",
    ):
        super().__init__()
        if hasattr(x, "__next__"):
            raise ValueError(
                "`x` must be something that can be read several times. "
                f"Received: x={x!r}. Pass arrays, a dataset or a `PyDataset`."
            )
        self.x = x
        self.batch_size = checks.count("batch_size", batch_size)
        self.steps = None if steps is None else checks.count("steps", steps)
        self.when = checks.choice("when", when, _WHEN)
        self._epoch = 0
        self._trains = False
        self._done = b""

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuses a model without active layers."""
        model: Any = self.model
        if model.built:
            batch_normalization_recomputation.layers_to_recompute(model)
        self._done = b""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._trains = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Recomputes before `fit` validates."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Recomputes where there is no validation."""
        self._end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        """Recomputes if training stopped early, or weights were exchanged."""
        self._recompute()

    def _end_epoch(self) -> None:
        # Not for an `evaluate` that another callback calls.
        if not self._trains:
            return
        self._trains = False
        if self.when == "epoch" or self._epoch + 1 == self.params["epochs"]:
            self._recompute()

    def _recompute(self) -> None:
        model: Any = self.model
        # Frozen meanwhile: nothing moves.
        if not batch_statistics.active_layers(model):
            return
        # Weights may change after the last batch, as an optimizer's averages
        # of them (`use_ema`) do.
        if self._done == _fingerprint(model):
            return
        batch_normalization_recomputation.recompute_batch_normalization(
            model, self.x, self.batch_size, self.steps
        )
        self._done = _fingerprint(model)


def _fingerprint(model: Any) -> bytes:
    digest = hashlib.blake2b()
    layers = batch_statistics.active_layers(model).values()
    moving = [v for one in layers for v in one.non_trainable_variables]
    for variable in [*model.trainable_variables, *moving]:
        digest.update(ops.convert_to_numpy(variable).tobytes())
    return digest.digest()
