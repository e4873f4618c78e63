"""`recompute_batch_normalization`: moving averages of the trained weights."""

import contextlib
from typing import Any

import keras
import numpy as np
from keras import ops

from accumkit import batch_statistics, checks, kept_state, keras_internals
from accumkit.backends import backend, randomness


def recompute_batch_normalization(
    model: Any, x: Any, batch_size: int = 32, steps: int | None = None
) -> None:
    """Puts the statistics of data into a model's BatchNormalization layers.

    The moving averages that training leaves are those of a few late, possibly
    small, batches, taken while the weights moved. This runs the trained model
    over data in training mode, its weights fixed, and gives each active layer
    (`trainable`, and called with `training=True`) the mean and the variance of
    all that went through it:

        n = Σ nᵢ,  μ = Σ nᵢ·μᵢ / n,  v = Σ nᵢ·(vᵢ + (μᵢ − μ)²) / n

    over batches i. For a layer that sees the data itself this is the data's
    mean and (biased) variance, whatever the batch size. What a later layer
    sees was normalized batch by batch before, so that its statistics depend on
    the batch size a little. Everything else stays as it was: weights,
    optimizer, metrics and random seeds.

    Example:

    ```python
    normalized = keras.layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(normalized))
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=4)
    accumkit.recompute_batch_normalization(model, x, batch_size=32)
    ```

    Args:
        model: Any built Keras model whose `call` runs its layers.
        x: Inputs, as `model.predict` takes them: arrays, nested ones, a
            dataset or a `PyDataset`. Targets in it are passed over.
        batch_size: Int ≥ 1, samples in a forward pass, for arrays. Use what
            the model was trained on at a time. Defaults to `32`.
        steps: Int ≥ 1 or None, how many batches to use. Defaults to `None`,
            all.

    Raises:
        TypeError: If `model` is no Keras model or a number is not an integer.
        ValueError: If a number is below 1, the model is not built, or no
            BatchNormalization layer in it is active.

    Reference:

    - [Wu and Johnson, 2021](https://arxiv.org/abs/2105.07576), section 3:
      precise statistics.
    - [Chan et al., 1979](http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf):
      the pooled variance.
    """
    batch_size = checks.count("batch_size", batch_size)
    if steps is not None:
        steps = checks.count("steps", steps)
    layers = layers_to_recompute(model)
    strategy = getattr(model, "distribute_strategy", None)
    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope:
        passes = _ForwardPasses(model, layers)
    with kept_state.kept(model, randomness):
        try:
            found = passes.predict(
                x, batch_size=batch_size, steps=steps, verbose=0
            )
        finally:
            backend.sync(passes)
    if not found:
        raise ValueError(_none_active(list(layers)))
    for path, (counts, means, variances) in found.items():
        _put(layers[path], *_pooled(counts, means, variances))


def layers_to_recompute(model: Any) -> dict[str, Any]:
    """Returns the active BatchNormalization layers of a model, or raises.

    Args:
        model: A built Keras model.

    Returns:
        Layers by path.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built, or no layer is active.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`. Received: an object of class "
            f"{type(model).__name__}."
        )
    if not model.built:
        raise ValueError(
            "`model` must be built before its BatchNormalization layers are "
            f"recomputed. Received: {model.name!r}, not built. Train it, or "
            "call it on a batch."
        )
    layers = batch_statistics.active_layers(model)
    if not layers:
        raise ValueError(_none_active([]))
    return layers


class _ForwardPasses(keras.Model):
    """Predicts the statistics of a model's layers, a row for each batch.

    `predict` deals with arrays and datasets, compiling and devices.
    """

    def __init__(self, model: Any, layers: dict[str, Any]):
        # A name of its own, or later models would be numbered differently.
        super().__init__(name="batch_normalization_forward_passes")
        self.inner = model
        self.watched = layers
        if model.compiled:
            self.run_eagerly = model.run_eagerly
            self.jit_compile = model.jit_compile
        self.built = True

    def call(self, inputs: Any) -> dict[str, Any]:
        rows: dict[str, Any] = {}

        def note(path: str, *given: Any) -> None:
            *statistics, _ = given
            row = [ops.expand_dims(v, 0) for v in statistics]
            if path in rows:
                # A layer that is called several times.
                pairs = zip(rows[path], row, strict=True)
                row = [ops.concatenate(pair) for pair in pairs]
            rows[path] = row

        with batch_statistics.observed(self.watched, note):
            keras_internals.forward(self.inner, inputs)
        return rows


def _pooled(counts: Any, means: Any, variances: Any) -> tuple[Any, Any]:
    """Mean and variance of all values, from those of their parts."""
    share = np.asarray(counts, "float64")
    share = share[:, None] / share.sum()
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean) ** 2)).sum(0)


def _put(layer: Any, mean: Any, variance: Any) -> None:
    layer.moving_mean.assign(mean)
    layer.moving_variance.assign(variance)
    if getattr(layer, "renorm", False):
        # Batch renormalization goes on from it.
        layer.moving_stddev.assign(np.sqrt(variance + layer.epsilon))


def _none_active(paths: list[str]) -> str:
    received = (
        f"layers that `call` runs with `training=False`: {paths}"
        if paths
        else "none, or all of them frozen"
    )
    return (
        "`model` must have a BatchNormalization layer that training updates, "
        f"or there is nothing to recompute. Received: {received}. Unfreeze the "
        "layers (`layer.trainable = True`), or leave this out."
    )
