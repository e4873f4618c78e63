"""Two replicas on one processor, inside `fit`, in graph mode (case 10)."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest
from models import (
    Net,
    distance,
    fit_in_order,
    iterations,
    mlp,
    regression_data,
    tagger,
    token_data,
)

from accumkit.callbacks import BatchNormalizationCheck

pytestmark = [
    pytest.mark.backend("tensorflow"),
    # TensorFlow leaves the thread pool of a strategy to the collector.
    pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@functools.cache
def mirrored():
    """One for the process: TensorFlow mixes up the collectives of several."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def train(build, cls, data, batch, strategy=None, optimizer=None, **options):
    optimizer = optimizer or (lambda: keras.optimizers.SGD(0.1))
    loss = options.pop("loss", "mse")

    def make():
        model = build(cls)
        model.compile(optimizer(), loss, **options)
        return model

    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    start, logs = fit_in_order(model, data, batch, validation_data=data[:2])
    return model, start, logs


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (4, {"accumulation_steps": 4}),
        (16, {"micro_batch_size": 3}),
        (8, {"accumulation_steps": 2, "micro_batch_size": 3}),
    ],
)
@pytest.mark.parametrize("samples", [32, 40])
def test_10_as_on_one_device(batch, options, samples):
    data = regression_data(samples)

    def adam():
        return keras.optimizers.Adam(0.02, epsilon=1e-3)

    stock, start, expected = train(mlp, keras.Model, data, 16, optimizer=adam)
    ours, _, logs = train(
        mlp, Net, data, batch, mirrored(), optimizer=adam, **options
    )
    assert iterations(ours) == iterations(stock) == 2 * -(-samples // 16)
    assert distance(ours, stock, start) < 1e-5
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    wrong, _, _ = train(
        mlp,
        Net,
        data,
        batch,
        mirrored(),
        optimizer=adam,
        **{"accumulation_steps": 3, "micro_batch_size": 3},
    )
    assert distance(wrong, stock, start) > 1e-2


@pytest.mark.parametrize("remainder", ["apply", "carry", "drop"])
def test_10_remainders(remainder):
    from accumkit import optimizer_steps

    data = regression_data(40)
    options = {"accumulation_steps": 4, "remainder": remainder}
    one, start, _ = train(mlp, Net, data, 4, **options)
    two, _, _ = train(mlp, Net, data, 4, mirrored(), **options)
    assert iterations(two) == optimizer_steps(10, 4, 2, remainder)
    assert distance(two, one, start) < 1e-5


def test_10_ragged_tokens_on_replicas():
    """Replicas of a batch hold different numbers of tokens."""
    data = token_data(40)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    stock, start, _ = train(tagger, keras.Model, data, 16, loss=loss)
    ours, _, _ = train(
        tagger,
        Net,
        data,
        4,
        mirrored(),
        loss=loss,
        accumulation_steps=4,
    )
    wrong, _, _ = train(
        tagger,
        Net,
        data,
        4,
        mirrored(),
        loss=loss,
        accumulation_steps=4,
        weighting="uniform",
    )
    assert distance(ours, stock, start) < 1e-5
    assert distance(wrong, stock, start) > 1e-3


def test_10_one_all_reduce_per_window(monkeypatch):
    """The gradients meet once per window, in the taken branch only."""
    from tensorflow.python.distribute import distribute_lib

    seen = []
    reduce = distribute_lib.ReplicaContext.all_reduce

    def counting(self, op, value, options=None):
        import tensorflow as tf

        seen.append(tf.compat.v1.get_default_graph().name)
        return reduce(self, op, value, options)

    monkeypatch.setattr(distribute_lib.ReplicaContext, "all_reduce", counting)
    model, _, _ = train(
        mlp, Net, regression_data(32), 4, mirrored(), accumulation_steps=4
    )
    assert iterations(model) == 4
    assert seen
    assert all(re.search(r"cond(_\d+)?_true", name) for name in seen), seen


def test_10_mixed_precision_and_a_schedule():
    keras.config.set_dtype_policy("mixed_float16")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    try:
        model, start, _ = train(
            mlp,
            Net,
            regression_data(32),
            4,
            mirrored(),
            optimizer=lambda: keras.optimizers.SGD(schedule),
            accumulation_steps=4,
        )
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.optimizer_steps == 4
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 16)
    assert np.abs(model.get_weights()[0] - start[0]).max() > 1e-3


@pytest.mark.parametrize("size", [3, 4])
def test_a_loss_over_the_batch_is_that_of_a_replica(size):
    """As in stock Keras: negatives are those of the replica's share."""

    def spread_out(y_true, y_pred):
        z = keras.ops.normalize(y_pred, axis=-1)
        logits = keras.ops.matmul(z, keras.ops.transpose(z)) / 0.3
        labels = keras.ops.roll(keras.ops.arange(keras.ops.shape(z)[0]), 1)
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )

    def run(cls, **options):
        data = regression_data(32)[:2]
        return train(mlp, cls, data, 16, mirrored(), loss=spread_out, **options)

    stock, start, _ = run(keras.Model)
    model, _, _ = run(Net, micro_batch_size=size, loss_over="batch")
    assert iterations(model) == iterations(stock) > 0
    assert distance(model, stock, start) < 5e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        naive, _, _ = run(Net, micro_batch_size=size)
    assert distance(naive, stock, start) > 0.1


@pytest.mark.parametrize("loss_over", ["micro_batch", "batch"])
def test_pooled_statistics_are_those_of_a_replica(loss_over):
    """As in stock Keras, where each replica has averages of its own."""

    def build(cls):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        x = keras.layers.BatchNormalization(name="first", momentum=0.5)(inputs)
        return cls(inputs, keras.layers.Dense(3)(x))

    def run(cls, callbacks=(), **options):
        with mirrored().scope():
            model = build(cls)
            model.compile(keras.optimizers.SGD(0.01), "mse", **options)
        x, y, _ = regression_data(32)
        fit_in_order(model, (3 * x + 1, y), 16, callbacks=list(callbacks))
        layer = model.get_layer("first")
        moving = layer.moving_mean, layer.moving_variance
        return [np.array(v.numpy()) for v in moving]

    expected = run(keras.Model)
    check = BatchNormalizationCheck("pool_statistics")
    options = {"micro_batch_size": 3, "loss_over": loss_over}
    ours = run(Net, [check], **options)
    naive = run(Net, **options)
    for one, wrong, right in zip(ours, naive, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=2e-6)
        assert np.abs(wrong / right - 1).max() > 0.01
