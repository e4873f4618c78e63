"""Random partitions against stock Keras's large batch, one step each."""

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from models import Net

REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def build(cls):
    """Tokens in, one number a token out; the mask comes from the zeros."""
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(
        7, 3, mask_zero=True, embeddings_initializer="ones"
    )(inputs)
    x = keras.layers.Dense(
        1, kernel_initializer="ones", kernel_regularizer="l2"
    )(x)
    return cls(inputs, x)


MODELS = {}


def models(reduction, remainder, within):
    """Built and compiled once."""
    key = (reduction, remainder, within)
    if key not in MODELS:
        pair = build(Net), build(keras.Model)
        for model in pair:
            # Eagerly: every draw has shapes of its own.
            options = {"run_eagerly": True}
            if model is pair[0]:
                options |= {
                    "accumulation_steps": 2,
                    "remainder": remainder,
                    "micro_batch_size": within,
                }
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model.compile(keras.optimizers.SGD(0.05), loss, **options)
        MODELS[key] = pair
    return MODELS[key]


START = [
    np.linspace(-1, 1, 21, dtype="float32").reshape(7, 3),
    np.array([[0.5], [-0.3], [0.2]], "float32"),
    np.array([0.1], "float32"),
]


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    short=st.booleans(),
    reduction=st.sampled_from(REDUCTIONS),
    remainder=st.sampled_from(["apply", "carry"]),
    weights=st.booleans(),
    within=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_one_step(sizes, short, reduction, remainder, weights, within, seed):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = rng.integers(0, 7, size=(n, 4)).astype("int32")
    y = rng.normal(size=(n, 4, 1)).astype("float32")
    w = rng.uniform(0, 2, size=(n, 4)).astype("float32") if weights else None
    assume((x != 0).any())
    ours, stock = models(reduction, remainder, within)
    ours.set_weights(START)
    stock.set_weights(START)
    ours.discard_accumulated_gradients()
    # A window one longer than the run leaves a remainder.
    ours.accumulation_steps = len(sizes) + short
    before = ours.optimizer_steps

    def cut(start, stop):
        return (
            x[start:stop],
            y[start:stop],
            None if w is None else w[start:stop],
        )

    stock.train_on_batch(*cut(0, n))
    start = 0
    for size in sizes:
        ours.train_on_batch(*cut(start, start + size))
        start += size
    if short:
        assert ours.optimizer_steps == before
        for a, b in zip(ours.get_weights(), START, strict=True):
            np.testing.assert_array_equal(a, b)
        assert ours.open_micro_batches > 0
        ours.apply_accumulated_gradients()
    assert ours.optimizer_steps == before + 1
    moved = max(
        np.abs(a - b).max()
        for a, b in zip(stock.get_weights(), START, strict=True)
    )
    assert moved > 1e-5
    for a, b in zip(ours.get_weights(), stock.get_weights(), strict=True):
        # One step from the same weights: rounding of the gradient's sum and
        # of the weight itself.
        assert np.abs(a - b).max() <= 2e-6 * moved + 1.2e-7


def test_the_property_can_fail():
    """With uniform weights the same comparison does."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 7, size=(5, 4)).astype("int32")
    y = rng.normal(size=(5, 4, 1)).astype("float32")
    stock, wrong = build(keras.Model), build(Net)
    stock.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    wrong.compile(
        keras.optimizers.SGD(0.05),
        "mse",
        run_eagerly=True,
        accumulation_steps=2,
        weighting="uniform",
    )
    stock.set_weights(START)
    wrong.set_weights(START)
    stock.train_on_batch(x, y)
    wrong.train_on_batch(x[:4], y[:4])
    wrong.train_on_batch(x[4:], y[4:])
    a, b = wrong.get_weights()[0], stock.get_weights()[0]
    assert np.abs(a - b).max() > 1e-4
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(a, b, rtol=1e-5)
