"""Moving averages, computed again from data and the weights as they are."""

import keras
import numpy as np
import pytest
from keras import layers

import accumkit
from accumkit.callbacks import BatchNormalizationRecomputation


class Net(accumkit.AccumulationMixin, keras.Model):
    pass


def data(samples=107, features=5):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (samples, features)).astype("float32")
    # Rare and large: variances of small batches miss them.
    x[::20] += 20
    y = rng.normal(size=(samples, 1)).astype("float32")
    return x, y


def network(cls=keras.Model, seed=5, **options):
    """Normalizes its inputs, and once more behind a dropout."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = layers.BatchNormalization(name="first", **options)(inputs)
    x = layers.Dropout(0.3, seed=seed)(x)
    x = layers.Dense(4, activation="tanh")(x)
    x = layers.BatchNormalization(name="second")(x)
    return cls(inputs, layers.Dense(1)(x))


def compiled(model, **options):
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def array(variable):
    return np.array(keras.ops.convert_to_numpy(variable))


def moments(layer):
    return array(layer.moving_mean), array(layer.moving_variance)


def assert_moments(layer, values, rtol=1e-5):
    """`values`: of shape (n, channels)."""
    values = values.astype("float64")
    mean, variance = moments(layer)
    np.testing.assert_allclose(mean, values.mean(0), rtol=rtol)
    np.testing.assert_allclose(variance, values.var(0), rtol=rtol)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("size", [7, 32, 100])
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_first_layer_has_the_moments_of_the_data(size, kind, mode):
    x, y = data()
    model = compiled(network(), **mode)
    model.fit(x, y, batch_size=16, verbose=0)
    first = model.get_layer("first")
    assert np.abs(array(first.moving_mean) - x.mean(0)).max() > 0.1
    if kind == "arrays":
        accumkit.recompute_batch_normalization(model, x, batch_size=size)
    else:
        accumkit.recompute_batch_normalization(model, Batches(x, y, size))
    assert_moments(first, x)
    if size == 7:
        # What is easily done wrong: the mean of the batches' variances.
        parts = [x[i : i + 7].var(0) for i in range(0, 107, 7)]
        off = np.mean(parts, axis=0) / x.var(0) - 1
        assert np.abs(off).min() > 0.05


def test_later_layers_see_what_went_through_them():
    """As a forward pass in training mode normalizes it, batch by batch."""
    x, y = data()
    model = compiled(network())
    model.fit(x, y, batch_size=16, verbose=0)
    model.get_layer("dropout").rate = 0.0
    accumkit.recompute_batch_normalization(model, x, batch_size=25)
    first = model.get_layer("first")
    gamma, beta = array(first.gamma), array(first.beta)
    kernel, bias = map(array, model.get_layer("dense").weights)
    through = []
    for start in range(0, 107, 25):
        part = x[start : start + 25].astype("float64")
        part = (part - part.mean(0)) / np.sqrt(part.var(0) + first.epsilon)
        through.append(np.tanh((part * gamma + beta) @ kernel + bias))
    assert_moments(model.get_layer("second"), np.concatenate(through), 1e-4)


def test_nothing_else_changes():
    x, y = data()
    model = compiled(network())
    model.fit(x, y, batch_size=16, verbose=0)
    state = [
        *model.trainable_variables,
        *model.optimizer.variables,
        *model.metrics_variables,
        *(v for v in model.non_trainable_variables if "seed" in v.path),
    ]
    assert any("seed" in v.path for v in state)
    before = [array(v) for v in state]
    function = model.train_function
    count = len(model.variables)
    accumkit.recompute_batch_normalization(model, x)
    for variable, value in zip(state, before, strict=True):
        np.testing.assert_array_equal(array(variable), value, variable.path)
    assert model.train_function is function
    assert len(model.variables) == count
    assert model.get_layer("first").momentum == 0.99
    assert "call" not in vars(model.get_layer("first"))
    # Trains on as if nothing had happened: same dropout, same batches.
    twin = compiled(network())
    twin.fit(x, y, batch_size=16, verbose=0)
    for one in (model, twin):
        one.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    for a, b in zip(
        model.trainable_variables, twin.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(array(a), array(b))


def test_state_is_put_back_after_an_error():
    x, y = data()
    model = compiled(network())
    model.fit(x, y, batch_size=16, verbose=0)
    before = [array(v) for v in model.variables]

    def broken():
        yield x[:8]
        raise RuntimeError("no more")

    with pytest.raises(Exception, match="no more"):
        accumkit.recompute_batch_normalization(model, broken(), steps=5)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(array(variable), value)
    model.fit(x, y, batch_size=16, verbose=0)


def test_steps():
    x, _ = data()
    model = network()
    accumkit.recompute_batch_normalization(model, x, batch_size=10, steps=3)
    assert_moments(model.get_layer("first"), x[:30])


@pytest.mark.parametrize("options", [{"renorm": True}, {"synchronized": True}])
def test_other_kinds(options):
    if "synchronized" in options and keras.config.backend() != "tensorflow":
        pytest.skip("Keras has it on TensorFlow only")
    x, _ = data()
    model = network(**options)
    accumkit.recompute_batch_normalization(model, x, batch_size=10)
    first = model.get_layer("first")
    assert_moments(first, x)
    if "renorm" in options:
        expected = np.sqrt(x.var(0) + first.epsilon)
        np.testing.assert_allclose(array(first.moving_stddev), expected, 1e-5)


class Off(keras.Model):
    def __init__(self):
        super().__init__()
        self.off = layers.BatchNormalization(name="off")

    def call(self, inputs):
        return self.off(inputs, training=False)


def test_masks_nested_axis_frozen_and_switched_off():
    rng = np.random.default_rng(1)
    x = rng.normal(1, 1, (23, 6, 3)).astype("float32")
    lengths = rng.integers(1, 7, 23)
    x[np.arange(6) >= lengths[:, None]] = 0
    image = rng.normal(2, 3, (23, 2, 4, 4)).astype("float32")

    inner_in = keras.Input((2, 4, 4))
    normalized = layers.BatchNormalization(axis=1, name="channels")(inner_in)
    off = Off()
    normalized = off(normalized)
    frozen = layers.BatchNormalization(name="frozen", trainable=False)
    inner = keras.Model(inner_in, frozen(normalized), name="inner")

    sequence = keras.Input((6, 3), name="sequence")
    picture = keras.Input((2, 4, 4), name="picture")
    masked = layers.Masking()(sequence)
    masked = layers.BatchNormalization(name="masked")(masked)
    a = layers.GlobalAveragePooling1D()(masked)
    b = layers.Flatten()(inner(picture))
    model = keras.Model(
        {"sequence": sequence, "picture": picture},
        layers.Dense(1)(layers.Concatenate()([a, b])),
    )
    unchanged = [*off.variables, *frozen.variables]
    before = [array(v) for v in unchanged]
    accumkit.recompute_batch_normalization(
        model, {"sequence": x, "picture": image}, batch_size=5
    )
    kept = x[np.arange(6) < lengths[:, None]]
    assert_moments(model.get_layer("masked"), kept)
    through = np.moveaxis(image, 1, -1).reshape(-1, 2)
    assert_moments(inner.get_layer("channels"), through)
    for variable, value in zip(unchanged, before, strict=True):
        np.testing.assert_array_equal(array(variable), value)


def test_a_layer_that_is_called_twice():
    left, right = keras.Input((5,)), keras.Input((5,))
    shared = layers.BatchNormalization()
    model = keras.Model([left, right], shared(left) + shared(right))
    x, _ = data()
    accumkit.recompute_batch_normalization(model, [x, 2 * x], batch_size=10)
    assert_moments(shared, np.concatenate([x, 2 * x]))


def test_half_precision(mixed_float16):
    x, _ = data()
    model = network()
    accumkit.recompute_batch_normalization(model, x, batch_size=10)
    assert_moments(model.get_layer("first"), x.astype("float16"), 1e-4)


def test_errors():
    x, _ = data()
    recompute = accumkit.recompute_batch_normalization
    with pytest.raises(TypeError, match="`model` must be a"):
        recompute(layers.BatchNormalization(), x)
    unbuilt = keras.Sequential([layers.BatchNormalization()])
    with pytest.raises(ValueError, match=r"`model` must be built.*Train it"):
        recompute(unbuilt, x)
    plain = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="must have a BatchNormalization"):
        recompute(plain, x)
    frozen = network()
    frozen.trainable = False
    with pytest.raises(ValueError, match="all of them frozen"):
        recompute(frozen, x)
    off = Off()
    off(x)
    with pytest.raises(ValueError, match=r"`training=False`: \['off'\]"):
        recompute(off, x)
    with pytest.raises(ValueError, match="`batch_size` must be an integer"):
        recompute(network(), x, batch_size=0)
    with pytest.raises(TypeError, match="`steps` must be an integer"):
        recompute(network(), x, steps=1.5)
    with pytest.raises(ValueError, match="`when` must be one of"):
        BatchNormalizationRecomputation(x, when="never")
    with pytest.raises(ValueError, match="`x` must be something that can be"):
        BatchNormalizationRecomputation(iter([x]))
    with pytest.raises(ValueError, match="must have a BatchNormalization"):
        compiled(plain).fit(
            x, x, verbose=0, callbacks=[BatchNormalizationRecomputation(x)]
        )


class Look(keras.callbacks.Callback):
    """Notes when the first layer has the moments of the data."""

    def __init__(self, x):
        super().__init__()
        self.expected = x.mean(0)
        self.seen = []

    def note(self, name):
        mean = array(self.model.get_layer("first").moving_mean)
        if np.abs(mean - self.expected).max() < 1e-4:
            self.seen.append(name)

    def on_test_end(self, logs=None):
        self.note("validated")

    def on_epoch_end(self, epoch, logs=None):
        self.note(epoch)

    def on_train_end(self, logs=None):
        self.note("end")


@pytest.mark.parametrize("cls", [keras.Model, Net])
@pytest.mark.parametrize("when", ["end", "epoch"])
@pytest.mark.parametrize("validated", [True, False])
def test_callback(cls, when, validated):
    x, y = data()
    ours = {"accumulation_steps": 4} if cls is Net else {}
    model = compiled(network(cls), **ours)
    look = Look(x)
    model.fit(
        x,
        y,
        batch_size=16,
        epochs=3,
        verbose=0,
        validation_data=(x, y) if validated else None,
        callbacks=[BatchNormalizationRecomputation(x, when=when), look],
    )
    epochs = [2] if when == "end" else [0, 1, 2]
    if validated:
        epochs = [name for n in epochs for name in ("validated", n)]
    assert look.seen == [*epochs, "end"]
    # The statistics are those of the final weights.
    after = [moments(model.get_layer(n)) for n in ("first", "second")]
    accumkit.recompute_batch_normalization(model, x)
    for name, values in zip(("first", "second"), after, strict=True):
        for a, b in zip(moments(model.get_layer(name)), values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("how", ["stopped", "average"])
def test_callback_where_weights_change_last(how):
    x, y = data()
    average = {"use_ema": True, "ema_momentum": 0.9}
    optimizer = keras.optimizers.SGD(
        0.01, **(average if how == "average" else {})
    )
    model = network()
    model.compile(optimizer, "mse")
    stop = keras.callbacks.EarlyStopping(
        "loss", patience=1, mode="max", restore_best_weights=True
    )
    recomputation = BatchNormalizationRecomputation(x)
    model.fit(
        x,
        y,
        epochs=4,
        verbose=0,
        callbacks=[stop, recomputation] if how == "stopped" else recomputation,
    )
    if how == "stopped":
        assert stop.stopped_epoch == 1
    before = moments(model.get_layer("second"))
    accumkit.recompute_batch_normalization(model, x)
    after = moments(model.get_layer("second"))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_callback_leaves_training_as_it_is():
    """Training reads the statistics of its batches only.

    Without a seed of its own dropout draws from torch's generator.
    """
    x, y = data()
    runs = []
    for callbacks in ([], [BatchNormalizationRecomputation(x, when="epoch")]):
        model = compiled(network(Net, seed=None), accumulation_steps=2)
        model.fit(
            x,
            y,
            batch_size=16,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        runs.append([array(v) for v in model.trainable_variables])
    start = [array(v) for v in network(Net).trainable_variables]
    for a, b, c in zip(*runs, start, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a - c).max() > 0
