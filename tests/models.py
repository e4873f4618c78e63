"""Small models and data for the tests."""

import keras
import numpy as np

import accumkit


@keras.saving.register_keras_serializable("accumkit_tests")
class Net(accumkit.AccumulationMixin, keras.Model):
    """A Functional model with accumulation."""


@keras.saving.register_keras_serializable("accumkit_tests")
class Stack(accumkit.AccumulationMixin, keras.Sequential):
    """A Sequential model with accumulation."""


@keras.saving.register_keras_serializable("accumkit_tests")
class Called(accumkit.AccumulationMixin, keras.Model):
    """A model in `call()` style, built by its first batch."""

    def __init__(self, units=1, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(
            units, use_bias=False, kernel_initializer="zeros"
        )

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def one_weight(cls=Stack):
    """Model W of the cases: one weight from zero."""
    return cls(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )


def weight(model):
    """The one weight of W, as a Python float."""
    return float(model.get_weights()[0].squeeze())


def negative_mean(y_true, y_pred):
    """The loss of model G: its gradient is always -1."""
    return -keras.ops.mean(y_pred)


def column(*values):
    """Targets of shape (n, 1)."""
    return np.array(values, "float32")[:, None]


def ones(n):
    """Inputs of shape (n, 1)."""
    return np.ones((n, 1), "float32")


def fit(model, *y, batch_size=1, **kwargs):
    """Fits a one-weight model to targets `y` in their order."""
    return model.fit(
        ones(len(y)),
        column(*y),
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        **kwargs,
    )


def fit_in_order(model, data, batch_size, epochs=2, **kwargs):
    """Fits `(x, y)` or `(x, y, weights)`; weights before, and the logs."""
    x, y, *weights = data
    start = model.get_weights()
    history = model.fit(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return start, history.history


def mlp(cls, seed=3, dtype=None):
    """A small Functional net with a penalty and a constraint."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((5,), dtype=dtype)
    x = keras.layers.Dense(
        8, activation="tanh", kernel_regularizer="l2", dtype=dtype
    )(inputs)
    x = keras.layers.Dense(
        3, kernel_constraint=keras.constraints.MaxNorm(1.5), dtype=dtype
    )(x)
    return cls(inputs, x)


def tagger(cls, seed=3, embedding="dense"):
    """Tokens in, one class a token out, padding masked."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(11, 4, mask_zero=True)(inputs)
    x = keras.layers.Dense(5, activation="tanh")(x)
    x = keras.layers.Dense(3)(x)
    return cls(inputs, x)


def regression_data(n, seed=0, dtype="float32"):
    """Inputs (n, 5), targets (n, 3), weights (n,)."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, 5)).astype(dtype),
        rng.normal(size=(n, 3)).astype(dtype),
        rng.uniform(0.1, 3, size=n).astype(dtype),
    )


def token_data(n, seed=0):
    """Token ids (n, 6) with ragged padding, labels (n, 6)."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 11, size=(n, 6)).astype("int32")
    for row, length in zip(x, rng.integers(1, 7, size=n), strict=True):
        row[length:] = 0
    return x, rng.integers(0, 3, size=(n, 6)).astype("int32")


def distance(model, reference, start):
    """Largest weight difference relative to the size of the movement.

    Asserts that the reference's weights moved.
    """
    moved, apart = 0.0, 0.0
    for w, r, s in zip(
        model.get_weights(), reference.get_weights(), start, strict=True
    ):
        moved = max(moved, float(np.abs(r - s).max()))
        apart = max(apart, float(np.abs(w - r).max()))
    assert moved > 1e-4, "the reference did not move"
    assert np.isfinite([moved, apart]).all()
    return apart / moved


def iterations(model):
    """The optimizer steps that the optimizer itself has counted."""
    return int(model.optimizer.iterations.numpy())
