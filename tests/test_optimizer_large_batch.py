"""`AccumulationOptimizer` takes the step of the large batch."""

import keras
import numpy as np
import pytest
from models import (
    distance,
    fit,
    iterations,
    mlp,
    regression_data,
    tagger,
    token_data,
    weight,
)
from optimizers import SGD, Weighing, one_by_one, plain, train
from test_equivalence import OPTIMIZERS, TOLERANCE

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)

BACKEND = keras.config.backend()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_even_windows_are_the_large_batch(optimizer, mode):
    make, data = OPTIMIZERS[optimizer], regression_data(48)
    stock, start = train(mlp, keras.Model, data, 16, make())
    ours, _ = train(
        mlp, keras.Model, data, 4, AccumulationOptimizer(make(), 4), **mode
    )
    alone, _ = train(mlp, keras.Model, data, 4, make())
    assert iterations(ours) == iterations(stock) == 6
    # Ten times shorter steps: the rounding of weights counts ten times more.
    factor = 10 if optimizer == "slow sgd" else 1
    assert distance(ours, stock, start) < factor * TOLERANCE
    assert distance(alone, stock, start) > 1e-2


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_exact_weights_are_the_large_batch(kind, mode):
    build, data, loss = mlp, regression_data(37), "mse"
    if kind == "tokens":
        build, data = tagger, token_data(37)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(weighting):
        optimizer = AccumulationOptimizer(SGD(0.1), 4, weighting)
        callbacks = [OptimizerRemainder()]
        return train(
            *(build, Weighing, data, 4, optimizer, loss),
            callbacks=callbacks,
            **mode,
        )[0]

    stock, start = train(build, keras.Model, data, 16, SGD(0.1), loss)
    ours, wrong = run("exact"), run("uniform")
    assert iterations(ours) == iterations(stock) == 6
    assert distance(ours, stock, start) < 2 * TOLERANCE
    assert distance(wrong, stock, start) > 1e-3


def test_exact_needs_weights():
    variable, one = keras.Variable([0.0]), keras.ops.ones((1,))
    optimizer = AccumulationOptimizer(SGD(0.1), 2, "exact")
    optimizer.build([variable])
    with pytest.raises(ValueError, match=r"`weighting='exact'` needs .*with"):
        optimizer.apply([one])
    # A weight ends with its block.
    with pytest.raises(RuntimeError), optimizer.micro_batch_weight(3):
        raise RuntimeError
    with pytest.raises(ValueError, match="weight"):
        optimizer.apply([one])
    assert optimizer.open_micro_batches == 0


def test_windows_without_weight_do_nothing():
    optimizer = AccumulationOptimizer(SGD(0.1), 2, "exact")
    model = plain(optimizer)
    with optimizer.micro_batch_weight(0.0):
        one_by_one(model, 1, 1)
    assert weight(model) == 0.0
    assert iterations(model) == 1


def test_moving_averages_once_per_window(mode):
    def make():
        return SGD(0.1, use_ema=True, ema_momentum=0.5)

    stock = plain(make(), **mode)
    fit(stock, *[1, 2, 3, 4] * 2, batch_size=2)
    ours = plain(AccumulationOptimizer(make(), 2), **mode)
    fit(ours, *[1, 2, 3, 4] * 2)
    assert weight(ours) == pytest.approx(weight(stock), rel=1e-6)
    bare = plain(SGD(0.1))
    fit(bare, *[1, 2, 3, 4] * 2, batch_size=2)
    assert weight(ours) != pytest.approx(weight(bare), rel=1e-3)


def test_sparse_gradients(mode):
    """Embeddings on TensorFlow; the reference is dense, as on the others."""
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )
    data = token_data(32)
    stock, start = train(tagger, keras.Model, data, 16, SGD(0.01), loss)
    ours, _ = train(
        *(tagger, keras.Model, data, 4),
        *(AccumulationOptimizer(SGD(0.04), 4), loss),
        **mode,
    )
    assert distance(ours, stock, start) < 2 * TOLERANCE


def test_one_is_the_plain_optimizer(mode):
    data = regression_data(20)
    stock, _ = train(mlp, keras.Model, data, 4, "adam", **mode)
    optimizer = AccumulationOptimizer("adam", 1)
    ours, _ = train(mlp, keras.Model, data, 4, optimizer, **mode)
    for a, b in zip(stock.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(optimizer.variables) == len(stock.optimizer.variables)
    assert optimizer.open_micro_batches == 0
    with pytest.raises(ValueError, match="must not leave 1"):
        optimizer.accumulation_steps = 2


def test_steps_per_execution():
    if BACKEND == "torch":
        pytest.skip("Keras on torch has no steps_per_execution")
    model = plain(AccumulationOptimizer(SGD(0.1), 4), steps_per_execution=5)
    fit(model, *[1, 2, 3, 4] * 3)
    stock = plain(SGD(0.1))
    fit(stock, *[1, 2, 3, 4] * 3, batch_size=4)
    assert iterations(model) == 3
    assert weight(model) == pytest.approx(weight(stock), rel=1e-6)
    assert model.optimizer.open_micro_batches == 0
