"""`AccumulationOptimizer` on two replicas, in `fit`, in a graph (case 10)."""

import keras
import numpy as np
import pytest
from models import (
    distance,
    iterations,
    mlp,
    regression_data,
    tagger,
    token_data,
)
from optimizers import SGD, Weighing, plain, train
from test_mirrored_strategy import mirrored

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)

pytestmark = [
    pytest.mark.backend("tensorflow"),
    # TensorFlow leaves the thread pool of a strategy to the collector.
    pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.mark.parametrize("samples", [32, 40])
def test_10_two_replicas(samples):
    data = regression_data(samples)

    def adam():
        return keras.optimizers.Adam(0.02, epsilon=1e-3)

    def ours(n):
        with mirrored().scope():
            optimizer = AccumulationOptimizer(adam(), n)
            model = plain(optimizer, "mse", mlp, keras.Model)
        x, y, _ = data
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=[OptimizerRemainder()],
        )
        return model

    stock, start = train(mlp, keras.Model, data, 16, adam())
    right, wrong = ours(4), ours(3)
    assert iterations(right) == iterations(stock) == 2 * -(-samples // 16)
    assert distance(right, stock, start) < 1e-5
    assert distance(wrong, stock, start) > 1e-2


@pytest.mark.parametrize("scaled", [False, True])
def test_10_weights_of_each_replica(scaled):
    """Replicas of a batch hold different numbers of tokens."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = token_data(40)
    stock, start = train(tagger, keras.Model, data, 16, SGD(0.1), loss)
    apart = []
    for weighting in ("exact", "uniform"):
        with mirrored().scope():
            optimizer = AccumulationOptimizer(SGD(0.1), 4, weighting)
            if scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 16.0)
            model = plain(optimizer, loss, tagger, Weighing)
        model.fit(
            *data,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[OptimizerRemainder()],
        )
        assert iterations(model) == 6
        apart.append(distance(model, stock, start))
    assert apart[0] < 1e-5
    assert apart[1] > 1e-3


def test_10_scaling_inside_and_a_schedule(mixed_float16):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    with mirrored().scope():
        optimizer = AccumulationOptimizer(
            keras.optimizers.LossScaleOptimizer(SGD(schedule), 1024.0), 4
        )
        model = plain(optimizer, "mse", mlp, keras.Model, auto_scale_loss=False)
    x, y, _ = regression_data(32)
    start = model.get_weights()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert iterations(model) == 4
    assert float(optimizer.learning_rate) == pytest.approx(0.1 / 16)
    assert np.abs(model.get_weights()[0] - start[0]).max() > 1e-3


def test_apply_belongs_into_a_replica():
    with mirrored().scope():
        variable = keras.Variable([1.0])
        optimizer = AccumulationOptimizer("sgd", 2)
        optimizer.build([variable])
        with pytest.raises(ValueError, match="in replica context"):
            optimizer.apply([keras.ops.ones((1,))])
