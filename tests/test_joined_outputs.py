"""Metrics within a batch: of all pieces at once where outputs are small."""

import keras
import numpy as np
import pytest
from models import Net

import accumkit
from accumkit import joined_outputs

ROWS = 30


def largest_error(y_true, y_pred):
    """One number that pieces of a batch cannot be averaged to."""
    return keras.ops.max(keras.ops.abs(y_true - y_pred))


class Rows:
    """Sees batches in `compute_metrics`."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        rows = keras.ops.shape(x)[0]
        return {**logs, "rows": keras.ops.cast(rows, "float32")}


class Stock(Rows, keras.Model):
    pass


class Summing(Rows, Net):
    pass


def two_outputs(cls):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(5, "softmax", name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    return cls(inputs, [kind, size])


def history(cls, **options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 6)).astype("float32")
    y = [rng.integers(5, size=70), rng.normal(size=(70, 1)).astype("float32")]
    weights = [rng.uniform(size=70).astype("float32") for _ in y]
    model = two_outputs(cls)
    model.compile(
        keras.optimizers.SGD(0.1),
        ["sparse_categorical_crossentropy", "mse"],
        metrics=[["accuracy"], ["mae", largest_error]],
        weighted_metrics=[[], ["mse"]],
        **options,
    )
    logs = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=ROWS,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    return {k: np.array(v) for k, v in logs.items() if k[-5:] != "_loss"}


@pytest.mark.parametrize("size", [4, 10, 64], ids=["ragged", "even", "one"])
def test_they_are_those_of_stock_keras(size, mode):
    stock = history(keras.Model)
    ours = history(Net, micro_batch_size=size, **mode)
    assert stock.keys() == ours.keys()
    for name, values in stock.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


def test_piece_by_piece_they_are_not(monkeypatch):
    """The control, and what large outputs get: sums are right, others not."""
    monkeypatch.setattr(joined_outputs, "MOST", 5)  # six are put out
    stock = history(keras.Model)
    ours = history(Net, micro_batch_size=4)
    for name in ("kind_accuracy", "size_mae", "size_mse"):
        np.testing.assert_allclose(ours[name], stock[name], rtol=1e-5)
    name = "size_largest_error"
    assert np.abs(ours[name] - stock[name]).max() > 0.1


def test_an_override_sees_the_batch(mode):
    stock = history(Stock)
    ours = history(Summing, micro_batch_size=4, **mode)
    assert set(stock["rows"]) == {10.0}  # of the last batch
    for name, values in stock.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


class Table(accumkit.AccumulationMixin, keras.Model):
    """One output has a row for each class instead of each sample."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return [self.dense(x), keras.ops.ones((3, 2))]


def test_outputs_that_are_not_of_samples(mode):
    """They are not joined: stock Keras's metric sees three rows."""

    def entries(y_true, y_pred):
        return keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")

    logs = {}
    for options in ({}, {"micro_batch_size": 4, **mode}):
        keras.utils.set_random_seed(1)
        model = Table()
        x = np.ones((16, 2), "float32")
        y = [np.ones((16, 3), "float32"), np.ones((16, 2), "float32")]
        model.compile(
            "sgd", ["mse", None], metrics=[["mae"], [entries]], **options
        )
        logs[len(options)] = model.fit(x, y, batch_size=16, verbose=0).history
    stock, ours = logs.values()
    assert any("entries" in name for name in stock)
    assert ours == {k: pytest.approx(v) for k, v in stock.items()}


def test_what_is_kept():
    plain, bare = (two_outputs(Net) for _ in range(2))
    plain.compile("sgd", "mse", metrics=["mae", "mae"])
    bare.compile("sgd", "mse")
    plain.train_on_batch(np.zeros((2, 6)), [np.zeros((2, 5)), np.zeros((2, 1))])
    small = np.zeros((2, 4, 4), "float32")
    assert joined_outputs.are_kept(plain, 2, [small, small])
    assert not joined_outputs.are_kept(bare, 2, [small, small])
    large = np.zeros((2, joined_outputs.MOST), "float32")
    assert joined_outputs.are_kept(plain, 2, large)
    assert not joined_outputs.are_kept(plain, 2, [large, small])
    assert not joined_outputs.are_kept(plain, 2, [small, small[:1]])
    assert not joined_outputs.are_kept(plain, 2, np.float32(0))
