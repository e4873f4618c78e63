"""Optimizers in `AccumulationOptimizer` and around it; its rate."""

import keras
import numpy as np
import pytest
from models import (
    distance,
    fit,
    iterations,
    mlp,
    negative_mean,
    ones,
    regression_data,
    weight,
)
from optimizers import SGD, plain, train
from test_equivalence import TOLERANCE

from accumkit import AccumulationOptimizer


def several():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(0.1), {".*kernel": keras.optimizers.Adam(0.02, epsilon=1e-3)}
        )
    )


def test_multi_optimizer_inside(mode):
    data = regression_data(48)
    stock, start = train(mlp, keras.Model, data, 16, several())
    ours, _ = train(
        mlp, keras.Model, data, 4, AccumulationOptimizer(several(), 4), **mode
    )
    assert iterations(ours) == 6
    assert distance(ours, stock, start) < TOLERANCE
    with pytest.raises(AttributeError, match="Learning rate"):
        _ = ours.optimizer.learning_rate


def test_multi_optimizer_outside():
    """Each group of variables with a window of its own."""
    groups = keras.optimizers.OptimizerMap(
        AccumulationOptimizer(SGD(0.1), 2),
        {".*kernel": AccumulationOptimizer(SGD(0.1), 4)},
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.MultiOptimizer(groups), negative_mean)
    moved = []
    for _ in range(4):
        before = model.get_weights()
        model.train_on_batch(ones(1), ones(1))
        after = model.get_weights()
        moved.append(
            [(n - o).item() for o, n in zip(before, after, strict=True)]
        )
    expected = [[0, 0], [0, 0.1], [0, 0], [0.1, 0.1]]
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_learning_rate_is_settable(mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 2)
    model = plain(optimizer, negative_mean, **mode)
    seen = []
    halve = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: seen.append(rate) or (rate / 2 if epoch else rate)
    )
    fit(model, *[0] * 4, epochs=2, callbacks=[halve])
    assert seen == pytest.approx([0.1, 0.1])
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == (
        pytest.approx(0.05)
    )
    assert weight(model) == pytest.approx(0.3, rel=1e-5)
