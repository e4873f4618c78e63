"""`AccumulationOptimizer` and loss scaling, inside and outside."""

import keras
import numpy as np
import pytest
from models import (
    distance,
    fit,
    iterations,
    mlp,
    regression_data,
    weight,
)
from optimizers import SGD, one_by_one, plain, train

from accumkit import AccumulationOptimizer


def scale_of(optimizer):
    return float(optimizer.dynamic_scale.numpy())


def test_scaling_inside_skips_the_window(mixed_float16, mode):
    inner = keras.optimizers.LossScaleOptimizer(SGD(0.1), 1024.0)
    optimizer = AccumulationOptimizer(inner, 2)
    model = plain(optimizer, auto_scale_loss=False, **mode)
    seen = one_by_one(model, 1, np.inf, 1, 1)
    assert seen == [0.0, 0.0, 0.0, pytest.approx(0.2, rel=1e-3)]
    assert iterations(model) == 1
    assert scale_of(inner) == 512.0


def test_scaling_outside_leaves_the_micro_batch_out(mixed_float16, mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 2)
    outer = keras.optimizers.LossScaleOptimizer(optimizer, 1024.0)
    model = plain(outer, **mode)
    seen = one_by_one(model, 1, np.inf, 1)
    assert seen == [0.0, 0.0, pytest.approx(0.2, rel=1e-3)]
    assert iterations(model) == 1
    assert scale_of(outer) == 512.0
    assert optimizer.open_micro_batches == 0


def test_scaling_on_both_sides_is_an_error(mixed_float16):
    inner = keras.optimizers.LossScaleOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        plain(AccumulationOptimizer(inner, 2))


def test_loss_scale_factor():
    optimizer = AccumulationOptimizer(SGD(0.1, loss_scale_factor=8.0), 2)
    assert optimizer.loss_scale_factor == 8.0
    model = plain(optimizer)
    fit(model, 1, 1)
    assert weight(model) == pytest.approx(0.2, rel=1e-6)


def test_mixed_precision_as_stock(mixed_float16, mode):
    data = regression_data(32)
    stock, start = train(mlp, keras.Model, data, 8, SGD(0.1))
    ours, _ = train(
        *(mlp, keras.Model, data, 4, AccumulationOptimizer(SGD(0.1), 2)),
        **mode,
    )
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert distance(ours, stock, start) < 1e-2
