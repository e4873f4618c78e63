"""Cases of the mixin that hold for `AccumulationOptimizer`."""

import keras
import numpy as np
import pytest
from models import (
    column,
    fit,
    iterations,
    negative_mean,
    weight,
)
from optimizers import SGD, one_by_one, plain

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)


def test_1_remainders(mode):
    for remainder, w, steps in (
        ("apply", 2.46, 4),
        ("carry", 1.78, 3),
        ("drop", 0.90, 2),
    ):
        model = plain(AccumulationOptimizer(SGD(0.1), 4), **mode)
        fit(
            model,
            *[1, 2, 3, 4, 5, 6],
            epochs=2,
            callbacks=[OptimizerRemainder(remainder)],
        )
        assert weight(model) == pytest.approx(w, rel=1e-6)
        assert iterations(model) == steps
        open_ones = model.optimizer.open_micro_batches
        assert open_ones == 0


def test_2_mean_not_sum(mode):
    model = plain(AccumulationOptimizer(SGD(0.1), 4), **mode)
    fit(model, 1, 2, 3, 4)
    assert weight(model) == pytest.approx(0.5, rel=1e-6)
    assert iterations(model) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.AdamW(0.1),
        lambda: keras.optimizers.Lion(0.1),
    ],
)
def test_3_bitwise_still_inside_a_window(optimizer, mode):
    model = plain(AccumulationOptimizer(optimizer(), 4), negative_mean, **mode)
    seen = one_by_one(model, *[0] * 8)
    stock = plain(optimizer(), negative_mean)
    expected = one_by_one(stock, 0, 0)
    assert seen[:3] == [0.0] * 3
    assert seen[3:7] == [seen[3]] * 4
    assert seen[3] == pytest.approx(expected[0], rel=1e-5)
    assert seen[7] == pytest.approx(expected[1], rel=1e-5)
    assert iterations(model) == 2


def test_4_schedules_count_optimizer_steps(mode):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = AccumulationOptimizer(SGD(schedule), 2)
    model = plain(optimizer, negative_mean, **mode)
    fit(model, *[0] * 8)
    assert weight(model) == pytest.approx(0.1875, rel=1e-6)
    assert float(optimizer.learning_rate) == pytest.approx(0.00625)


def test_5_clipping_once_per_window(mode):
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(
        inputs
    )
    model = keras.Model(inputs, outputs)
    model.compile(
        AccumulationOptimizer(SGD(1.0, global_clipnorm=1.0), 2),
        lambda y, p: 2 * keras.ops.mean(p),
        **mode,
    )
    x = np.array([[1, 0], [0, 1]], "float32")
    model.fit(x, column(0, 0), batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), [-(0.5**0.5)] * 2, rtol=1e-5
    )


def test_6_decay_once_per_window(mode):
    optimizer = AccumulationOptimizer(SGD(0.1, weight_decay=0.1), 4)
    model = plain(optimizer, **mode)
    model.set_weights([np.ones((1, 1))])
    x = np.zeros((4, 1), "float32")
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(0.99, rel=1e-6)


def test_11_n_is_settable_and_nothing_freezes(mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 4)
    model = plain(optimizer, **mode)
    reference = plain(SGD(0.1))
    fit(model, *[1, 2, 3, 4] * 3)
    fit(reference, *[1, 2, 3, 4] * 3, batch_size=4)
    assert iterations(model) == 3
    assert weight(model) == pytest.approx(weight(reference), rel=1e-6)
    function = model.train_function
    optimizer.accumulation_steps = 2
    fit(model, *[1, 2, 3, 4] * 2)
    assert iterations(model) == 3 + 4
    assert model.train_function is function
    # An open window keeps its N.
    fit(model, 1)
    optimizer.accumulation_steps = 3
    assert optimizer.open_micro_batches == 1
    fit(model, 1)
    assert iterations(model) == 8
    fit(model, 1, 1, 1)
    assert iterations(model) == 9


def test_21_gradients_are_not_counted_twice(mode):
    model = plain(AccumulationOptimizer(SGD(0.1), 2), **mode)
    assert one_by_one(model, 1, 1) == [0.0, pytest.approx(0.2, rel=1e-6)]
