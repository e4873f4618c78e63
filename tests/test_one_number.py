"""Losses whose divisor cannot be seen, and those that couple samples."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops
from models import Net, distance, regression_data

import accumkit

SGD = keras.optimizers.SGD
WAYS = {"across": {"accumulation_steps": 4}, "within": {"micro_batch_size": 4}}
VOCABULARY, LENGTH, SAMPLES = 7, 8, 16


def masked(y_true, y_pred):
    """The translation tutorials' loss: the mean over what is no padding."""
    keep = ops.cast(ops.not_equal(y_true, 0), y_pred.dtype)
    values = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    return ops.sum(values * keep) / ops.sum(keep)


class Translator(accumkit.AccumulationMixin, keras.Model):
    def accumulation_weight(self, x, y, y_pred, sample_weight):
        return ops.sum(ops.cast(ops.not_equal(y, 0), "float32"))


def translate(cls, batch_size, **options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 4)(inputs)
    model = cls(inputs, keras.layers.Dense(VOCABULARY)(x))
    model.compile(SGD(1.0), masked, **options)
    start = model.get_weights()
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, size=(SAMPLES, LENGTH))
    for row, ids_of_row in enumerate(ids):
        ids_of_row[1 + row // 2 :] = 0  # lengths 1 to 8
    model.fit(ids, ids, batch_size=batch_size, shuffle=False, verbose=0)
    return model, start


@pytest.mark.parametrize("way", WAYS)
def test_30_a_loss_function_that_divides_by_its_own_count(way, mode):
    stock, start = translate(keras.Model, SAMPLES)
    size = 4 if way == "across" else SAMPLES
    with pytest.warns(
        accumkit.AccumkitWarning, match="`accumulation_weight`"
    ) as caught:
        naive, _ = translate(Net, size, **WAYS[way], **mode)
    assert len([w for w in caught if "one number" in str(w.message)]) == 1
    assert distance(naive, stock, start) > 0.1
    exact, _ = translate(Translator, size, **WAYS[way], **mode)
    assert distance(exact, stock, start) < 3e-6


def kept_dimensions(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), keepdims=True)


COUPLE = {
    "dice": lambda: keras.losses.Dice(),
    "dice by name": lambda: "dice",
    "dice over the batch": lambda: keras.losses.Dice(axis=(0, 1, 2)),
    "tversky": lambda: keras.losses.Tversky(),
    "one number": lambda: lambda y, p: ops.mean(ops.square(y - p)),
    "kept dimensions": lambda: kept_dimensions,
}
FINE = {
    "dice per sample": lambda: keras.losses.Dice(axis=(1, 2, 3)),
    "tversky per sample": lambda: keras.losses.Tversky(axis=(1, 2, 3)),
    "values": lambda: "mse",
    "values of a function": lambda: (
        lambda y, p: ops.mean(ops.square(y - p), axis=-1)
    ),
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
}


def segment(loss, cls=Net, **options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 4, 2))
    outputs = keras.layers.Dense(1, activation="sigmoid")(inputs)
    model = cls(inputs, outputs)
    model.compile(SGD(0.1), loss, **options)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, 4, 2)).astype("float32")
    y = (x[..., :1] > 0).astype("float32")
    model.fit(x, y, batch_size=4, verbose=0)
    return model


@pytest.mark.parametrize("name", COUPLE)
@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 2}, {"micro_batch_size": 2}]
)
def test_coupling_losses_warn_once(name, options):
    with pytest.warns(accumkit.AccumkitWarning, match="couples") as caught:
        segment(COUPLE[name](), **options)
    ours = [w for w in caught if w.category is accumkit.AccumkitWarning]
    assert len(ours) == 1


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 2}, {"micro_batch_size": 2}]
)
def test_losses_of_values_do_not_warn(name, options):
    segment(FINE[name](), **options)  # a warning would be an error


def test_circle_couples_its_samples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 5)).astype("float32")
    y = np.arange(8) % 3
    for loss in (keras.losses.Circle(), "circle"):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        outputs = keras.layers.UnitNormalization()(
            keras.layers.Dense(4)(inputs)
        )
        model = Net(inputs, outputs)
        model.compile("sgd", loss, micro_batch_size=4)
        with pytest.warns(accumkit.AccumkitWarning, match="couples"):
            model.fit(x, y, batch_size=8, verbose=0)


def test_no_warning_where_nothing_is_accumulated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segment(keras.losses.Dice())
        segment(keras.losses.Dice(), accumulation_steps=2, weighting="uniform")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:The loss of 'b' returns one number")
def test_a_loss_that_returns_a_python_number(way, mode):
    """An output that is switched off: stock Keras trains the other."""

    def train(cls, batch_size, **options):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        outputs = [keras.layers.Dense(3, name=n)(inputs) for n in "ab"]
        model = cls(inputs, outputs)
        model.compile(SGD(0.1), ["mse", lambda y, p: 0], **options)
        x, y, _ = regression_data(16)
        start = model.get_weights()
        model.fit(x, [y, y], batch_size=batch_size, shuffle=False, verbose=0)
        return model, start

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        stock, start = train(keras.Model, 16)
        size = 4 if way == "across" else 16
        ours, _ = train(Net, size, **WAYS[way], **mode)
    assert distance(ours, stock, start) < 3e-6


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_piece_with_as_many_samples_as_outputs(size, way, mode):
    """A bare `y` must not be taken for a list with an entry per output."""

    def train(cls, batch_size, **options):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        outputs = [keras.layers.Dense(1, name=n)(inputs) for n in "pe"]
        model = cls(inputs, outputs)
        model.compile(SGD(0.1), ["mse", None], **options)
        x, y, _ = regression_data(16)
        start = model.get_weights()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")
            model.fit(
                x, y[:, :1], batch_size=batch_size, shuffle=False, verbose=0
            )
        return model, start

    stock, start = train(keras.Model, 16)
    if way == "across":
        ours, _ = train(Net, size, accumulation_steps=-(-16 // size), **mode)
    else:
        ours, _ = train(Net, 16, micro_batch_size=size, **mode)
    assert distance(ours, stock, start) < 3e-6
