"""`pool_statistics`: moving averages of BatchNormalization, once a window."""

import keras
import numpy as np
import pytest
from keras import layers

import accumkit
from accumkit.callbacks import BatchNormalizationCheck

PARTITIONS = {
    "across": (8, {"accumulation_steps": 4}),
    "across, ragged": (5, {"accumulation_steps": 7, "remainder": "apply"}),
    "within": (32, {"micro_batch_size": 8}),
    "within, ragged": (32, {"micro_batch_size": 5}),
    "both": (16, {"accumulation_steps": 2, "micro_batch_size": 3}),
    "loss over batch": (32, {"micro_batch_size": 5, "loss_over": "batch"}),
}


class Net(accumkit.AccumulationMixin, keras.Model):
    pass


def data(samples=96):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (samples, 4)).astype("float32")
    x[::20] += 20
    return x, rng.normal(size=(samples, 1)).astype("float32")


def network(cls, **options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    x = layers.BatchNormalization(name="first", momentum=0.7, **options)(inputs)
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.BatchNormalization(name="second")(x)
    return cls(inputs, layers.Dense(1)(x))


def moments(model, name="first"):
    layer = model.get_layer(name)
    moving = layer.moving_mean, layer.moving_variance
    return [np.array(keras.ops.convert_to_numpy(v)) for v in moving]


def fit(model, batch, callback=None, samples=96, epochs=2, **options):
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    x, y = data(samples)
    callbacks = [BatchNormalizationCheck(callback)] if callback else []
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_first_layer_is_that_of_the_large_batch(partition, mode):
    batch, options = PARTITIONS[partition]
    whole = batch * options.get("accumulation_steps", 1)
    stock = fit(network(keras.Model), whole, **mode)
    model = network(Net)
    start = moments(model)
    fit(model, batch, "pool_statistics", **options, **mode)
    rescaled = fit(network(Net), batch, "rescale_momentum", **options, **mode)
    expected = moments(stock)
    assert np.abs(expected[0] - start[0]).max() > 1
    for ours, wrong, right in zip(
        moments(model), moments(rescaled), expected, strict=True
    ):
        np.testing.assert_allclose(ours, right, rtol=2e-6)
        assert np.abs(wrong / right - 1).max() > 0.005
    assert model.optimizer_steps == 2 * -(-96 // whole)


def test_a_later_layer_has_what_went_through_it():
    """One window: the moments of all that the second layer saw."""
    x, _ = data(32)
    model = network(Net)
    model.get_layer("second").momentum = 0.0
    start = network(keras.Model)
    seen = []
    first = keras.Model(start.input, start.layers[2].output)
    for rows in range(0, 32, 6):
        seen.append(first(x[rows : rows + 6], training=True))
    seen = np.concatenate([keras.ops.convert_to_numpy(v) for v in seen])
    fit(model, 32, "pool_statistics", 32, 1, micro_batch_size=6)
    mean, variance = moments(model, "second")
    np.testing.assert_allclose(mean, seen.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, seen.var(0), rtol=1e-4)


def test_a_layer_that_is_called_twice():
    """Stock Keras updates it once for each call."""

    def build(cls):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        shared = layers.BatchNormalization(name="first", momentum=0.7)
        x = layers.Concatenate()([shared(inputs), shared(inputs * 2 + 1)])
        return cls(inputs, layers.Dense(1)(x))

    stock = fit(build(keras.Model), 32)
    model = fit(build(Net), 32, "pool_statistics", micro_batch_size=5)
    for ours, right in zip(moments(model), moments(stock), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-6)


def test_masked_nested_and_frozen_layers():
    def build(cls):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3, 4))
        within = keras.Input((3, 4))
        x = layers.Masking(3.5)(within)
        x = layers.BatchNormalization(momentum=0.7)(x)
        x = keras.Model(within, x, name="nested")(inputs)
        frozen = layers.BatchNormalization(name="frozen")
        frozen.trainable = False
        x = layers.GlobalAveragePooling1D()(frozen(x))
        return cls(inputs, layers.Dense(1)(x))

    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (64, 3, 4)).astype("float32")
    for row, length in zip(x, rng.integers(1, 4, 64), strict=True):
        row[length:] = 3.5
    y = np.ones((64, 1), "float32")

    def run(cls, callbacks=(), **options):
        model = build(cls)
        model.compile(keras.optimizers.SGD(0.001), "mse", **options)
        model.fit(
            x,
            y,
            batch_size=32,
            verbose=0,
            shuffle=False,
            callbacks=list(callbacks),
        )
        return model

    stock = run(keras.Model)
    model = run(
        Net, [BatchNormalizationCheck("pool_statistics")], micro_batch_size=6
    )
    for ours, right in zip(
        model.non_trainable_variables,
        stock.non_trainable_variables,
        strict=True,
    ):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(ours),
            keras.ops.convert_to_numpy(right),
            rtol=2e-6,
        )


@pytest.mark.filterwarnings("ignore:No window can be filled")
def test_an_open_window_goes_on_in_the_next_fit():
    """`remainder="carry"`: the window is the large batch all the same."""
    stock = fit(network(keras.Model), 96, epochs=1)
    model = network(Net)
    model.compile(
        keras.optimizers.SGD(0.01),
        "mse",
        accumulation_steps=6,
        remainder="carry",
    )
    x, y = data()
    check = BatchNormalizationCheck("pool_statistics")
    for rows in (slice(0, 32), slice(32, 96)):
        model.fit(
            x[rows],
            y[rows],
            batch_size=16,
            shuffle=False,
            verbose=0,
            callbacks=[check],
        )
    assert model.optimizer_steps == 1
    for ours, right in zip(moments(model), moments(stock), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-6)


def test_nothing_is_left_behind(tmp_path):
    """Without the callback training is what it was; no variable shows."""
    model = fit(network(Net), 32, "pool_statistics", micro_batch_size=8)
    plain = network(keras.Model)
    assert len(model.variables) == len(plain.variables)
    assert not [v for v in vars(model.get_layer("first")) if v == "call"]
    again = network(Net)
    again.set_weights(model.get_weights())
    for each in (model, again):
        fit(each, 32, micro_batch_size=8)
    for one, other in zip(
        model.get_weights(), again.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_it_follows_n():
    """From the epoch on in which accumulation begins."""
    check = BatchNormalizationCheck("pool_statistics")
    scheduler = accumkit.callbacks.AccumulationScheduler({0: 1, 1: 4})
    model, stock = network(Net), network(keras.Model)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    stock.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data(32)
    plain = {"shuffle": False, "verbose": 0}
    model.fit(
        x, y, batch_size=8, epochs=2, callbacks=[check, scheduler], **plain
    )
    for batch in (8, 32):
        stock.fit(x, y, batch_size=batch, **plain)
    assert model.optimizer_steps == 5
    for ours, right in zip(moments(model), moments(stock), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-6)


def test_it_needs_the_mixin():
    with pytest.raises(ValueError, match="needs a model with"):
        fit(network(keras.Model), 32, "pool_statistics")


@pytest.mark.backend("tensorflow")
def test_synchronized():
    stock = fit(network(keras.Model, synchronized=True), 32)
    model = network(Net, synchronized=True)
    fit(model, 32, "pool_statistics", micro_batch_size=5)
    for ours, right in zip(moments(model), moments(stock), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-6)
