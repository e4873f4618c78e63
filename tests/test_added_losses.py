"""Losses that layers add: values per sample, means, penalties."""

import keras
import numpy as np
import pytest
from keras import ops
from models import Net, distance, iterations

import accumkit

SGD = keras.optimizers.SGD


class Adds(keras.layers.Layer):
    """Adds a loss of what it is called with: values, or their mean."""

    def __init__(self, kind, factor=1.0):
        super().__init__()
        self.kind, self.factor = kind, factor

    def call(self, inputs):
        t, p = inputs
        values = ops.mean(ops.square(t - p), axis=-1)
        if "values" in self.kind:
            self.add_loss(values)
        if "mean" in self.kind:
            self.add_loss(self.factor * ops.mean(values))
        return p


def build(cls, kind, penalty=False, factor=1.0):
    keras.utils.set_random_seed(3)
    x, t = keras.Input((5,)), keras.Input((3,))
    dense = keras.layers.Dense(
        3, kernel_regularizer=keras.regularizers.L2(0.5) if penalty else None
    )
    return cls([x, t], Adds(kind, factor)([t, dense(x)]))


def data(n=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 5)).astype("float32")
    t = rng.normal(size=(n, 3)).astype("float32") + x[:, :3]
    return [x, t]


def train(cls, kind, batch_size, loss=None, penalty=False, factor=1.0, **kw):
    model = build(cls, kind, penalty, factor)
    model.compile(SGD(0.01), loss, **kw)
    start = model.get_weights()
    x = data()
    arguments = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    y = x[1] * 0.5 if loss else None
    logs = model.fit(x, y, epochs=2, **arguments).history
    return model, start, logs["loss"]


WAYS = [
    (16, {"micro_batch_size": 3}),
    (16, {"micro_batch_size": 4}),
    (8, {"accumulation_steps": 2}),
    (8, {"accumulation_steps": 2, "micro_batch_size": 3}),
]


@pytest.mark.parametrize(("batch_size", "options"), WAYS)
@pytest.mark.parametrize("penalty", [False, True])
def test_values_alone_are_summed(batch_size, options, penalty, mode):
    """CTC in a layer, say: no compiled loss, Keras sums what was added."""
    stock, start, loss = train(keras.Model, "values", 16, penalty=penalty)
    ours, _, own = train(
        Net, "values", batch_size, penalty=penalty, **options, **mode
    )
    assert distance(ours, stock, start) < 3e-6
    assert iterations(ours) == iterations(stock) == 2
    if "accumulation_steps" not in options:
        np.testing.assert_allclose(own, loss, rtol=1e-5)
    # Taken for a mean, the sum comes out smaller.
    naive, _, _ = train(
        Net, "values", batch_size, penalty=penalty, weighting="uniform",
        **options,
    )  # fmt: skip
    assert distance(naive, stock, start) > 0.1


@pytest.mark.parametrize(("batch_size", "options"), WAYS)
def test_means_alone_are_averaged(batch_size, options, mode):
    stock, start, _ = train(keras.Model, "mean", 16, penalty=True)
    ours, _, _ = train(Net, "mean", batch_size, penalty=True, **options, **mode)
    assert distance(ours, stock, start) < 3e-6


def test_values_and_means_within_a_batch(mode):
    """The share of a piece is known beforehand: exact, no warning."""
    stock, start, loss = train(keras.Model, "values mean", 16, penalty=True)
    ours, _, own = train(
        Net, "values mean", 16, penalty=True, micro_batch_size=3, **mode
    )
    assert distance(ours, stock, start) < 3e-6
    np.testing.assert_allclose(own, loss, rtol=1e-5)


def test_values_and_means_across_batches_warn():
    with pytest.warns(accumkit.AccumkitWarning, match="value per sample"):
        train(Net, "values mean", 8, accumulation_steps=2)


def test_values_beside_a_compiled_mean_warn_and_the_way_out_is_exact(mode):
    stock, start, _ = train(keras.Model, "values", 16, loss="mse")
    for batch_size, options in (WAYS[0], WAYS[2]):
        with pytest.warns(accumkit.AccumkitWarning, match=r"n \* ops.mean"):
            naive, _, _ = train(
                Net, "values", batch_size, loss="mse", **options
            )
        assert distance(naive, stock, start) > 0.1
        # What the warning says: n times the mean, n the effective batch.
        ours, _, _ = train(
            Net, "mean", batch_size, loss="mse", factor=16, **options, **mode
        )
        assert distance(ours, stock, start) < 3e-6


@pytest.mark.parametrize(("batch_size", "options"), WAYS)
def test_values_beside_a_compiled_sum(batch_size, options, mode):
    loss = keras.losses.MeanSquaredError(reduction="sum")
    stock, start, _ = train(keras.Model, "values", 16, loss, True)
    ours, _, _ = train(Net, "values", batch_size, loss, True, **options, **mode)
    assert distance(ours, stock, start) < 3e-6
