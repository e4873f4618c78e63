"""What `fit` takes on stock Keras it takes with accumulation."""

import warnings

import keras
import numpy as np
import pytest
from models import (
    Called,
    Net,
    Stack,
    column,
    distance,
    fit,
    iterations,
    mlp,
    one_weight,
    ones,
    regression_data,
    weight,
)

# Model G's loss is one number, a plain mean: weighting it by samples is right.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The loss of '(negative_mean|lambda)' returns one number"
)

WAYS = {
    "across": (4, {"accumulation_steps": 4}),
    "within": (16, {"micro_batch_size": 5}),
}


@pytest.mark.parametrize("way", WAYS)
def test_nested_inputs(way, mode):
    def build(cls):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((5,), name="a"), keras.Input((2, 3), name="b")
        x = keras.layers.Concatenate()([a, keras.layers.Flatten()(b)])
        y = {"out": keras.layers.Dense(3)(x), "aux": keras.layers.Dense(1)(x)}
        return cls({"a": a, "b": b}, y)

    rng = np.random.default_rng(0)
    x = {
        "a": rng.normal(size=(37, 5)).astype("float32"),
        "b": rng.normal(size=(37, 2, 3)).astype("float32"),
    }
    y = {"out": x["a"][:, :3], "aux": x["b"][:, 0, :1]}

    def run(cls, batch, **options):
        model = build(cls)
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer, {"out": "mse", "aux": "mae"}, **options)
        start = model.get_weights()
        history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model, start, history.history

    batch, options = WAYS[way]
    stock, start, expected = run(keras.Model, 16)
    ours, _, logs = run(Net, batch, **options, **mode)
    assert distance(ours, stock, start) < 2e-6
    assert logs.keys() == expected.keys()
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_alone(way):
    """A model whose loss is its own takes data without targets."""

    class Auto(keras.layers.Layer):
        def call(self, inputs):
            x, y = inputs
            self.add_loss(keras.ops.mean(keras.ops.square(x - y)))
            return y

    def build(cls):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        return cls(inputs, Auto()([inputs, keras.layers.Dense(5)(inputs)]))

    x, _, _ = regression_data(37)

    def run(cls, batch, **options):
        model = build(cls)
        model.compile(keras.optimizers.SGD(0.1), **options)
        start = model.get_weights()
        model.fit(x, batch_size=batch, shuffle=False, verbose=0)
        return model, start

    batch, options = WAYS[way]
    stock, start = run(keras.Model, 16)
    ours, _ = run(Net, batch, **options)
    assert distance(ours, stock, start) < 2e-6


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_generator_of_unknown_length():
    x, y, _ = regression_data(37)

    def batches(size):
        for i in range(0, 37, size):
            yield x[i : i + size], y[i : i + size]

    stock, ours = mlp(keras.Model), mlp(Net)
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    ours.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    start = stock.get_weights()
    stock.fit(batches(16), shuffle=False, verbose=0)
    ours.fit(batches(4), shuffle=False, verbose=0)
    assert distance(ours, stock, start) < 2e-6
    # Stock Keras on TensorFlow sometimes counts a batch that never came.
    assert iterations(ours) == 3


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_running_out_of_data_counts_nothing(steps_per_execution):
    """Ops that do not wait for the data run before the end is noticed."""
    import tensorflow as tf

    def batches():
        for value in (1, 2, 3, 4, 5, 6):
            yield ones(1), column(value)

    spec = tf.TensorSpec((1, 1))
    data = tf.data.Dataset.from_generator(
        batches, output_signature=(spec, spec)
    )
    for remainder, w, steps in [("carry", 1.78, 3), ("apply", 2.46, 4)] * 5:
        model = one_weight()
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            accumulation_steps=4,
            remainder=remainder,
            steps_per_execution=steps_per_execution,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Your input ran out")
            model.fit(data, epochs=2, shuffle=False, verbose=0)
        assert weight(model) == pytest.approx(w, abs=1e-6)
        assert iterations(model) == steps


def test_steps_per_epoch_cuts_windows_at_its_ends():
    x, y, _ = regression_data(40)

    def forever(size):
        while True:
            for i in range(0, 40, size):
                yield x[i : i + size], y[i : i + size]

    model = mlp(Net)
    model.compile("sgd", "mse", accumulation_steps=4)
    model.fit(forever(4), steps_per_epoch=6, epochs=2, shuffle=False, verbose=0)
    assert iterations(model) == 4


@pytest.mark.backend("tensorflow", "jax")
@pytest.mark.parametrize("steps_per_execution", [2, 3, 5, 32])
def test_steps_per_execution(steps_per_execution, mode):
    model = one_weight()
    model.compile(
        keras.optimizers.SGD(0.1),
        "mse",
        accumulation_steps=4,
        steps_per_execution=steps_per_execution,
        **mode,
    )
    fit(model, 1, 2, 3, 4, 5, 6, epochs=2)
    assert weight(model) == pytest.approx(2.46, abs=1e-6)
    assert iterations(model) == 4


def test_train_on_batch_is_one_micro_batch(mode):
    model = one_weight()
    model.compile(
        keras.optimizers.SGD(0.1), "mse", accumulation_steps=4, **mode
    )
    for y in (1, 2, 3):
        model.train_on_batch(ones(1), column(y))
    assert (weight(model), model.open_micro_batches) == (0, 3)
    model.evaluate(ones(4), column(1, 2, 3, 4), verbose=0)
    model.predict(ones(2), verbose=0)
    assert model.open_micro_batches == 3
    assert model.apply_accumulated_gradients() == 3
    assert weight(model) == pytest.approx(0.4)
    assert model.apply_accumulated_gradients() == 0
    assert model.discard_accumulated_gradients() == 0
    assert weight(model) == pytest.approx(0.4)
    assert iterations(model) == 1
    model.train_on_batch(ones(1), column(9))
    assert model.discard_accumulated_gradients() == 1
    for y in (1, 2, 3, 4):
        model.train_on_batch(ones(1), column(y))
    assert weight(model) == pytest.approx(0.4 + 0.2 * (2.5 - 0.4))


def test_empty_window_changes_nothing_to_the_bit():
    model = mlp(Net)
    model.compile(
        keras.optimizers.Adam(0.1, use_ema=True), "mse", accumulation_steps=4
    )
    assert model.apply_accumulated_gradients() == 0
    x, y, _ = regression_data(16)
    model.fit(x, y, batch_size=4, verbose=0)
    before = [*model.get_weights(), *[v.numpy() for v in optimizer_of(model)]]
    assert model.apply_accumulated_gradients() == 0
    after = [*model.get_weights(), *[v.numpy() for v in optimizer_of(model)]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def optimizer_of(model):
    return model.optimizer.variables


def test_evaluating_in_a_callback_changes_nothing(mode):
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(ones(2), column(1, 2), verbose=0)

    model = one_weight()
    model.compile(
        keras.optimizers.SGD(0.1), "mse", accumulation_steps=4, **mode
    )
    fit(model, 1, 2, 3, 4, 5, 6, epochs=2, callbacks=[Evaluate()])
    assert weight(model) == pytest.approx(2.46, abs=1e-6)


def test_callback_list_and_positional_arguments():
    model = one_weight()
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    x, y = ones(6), column(1, 2, 3, 4, 5, 6)
    callbacks = keras.callbacks.CallbackList(
        [], add_history=True, model=model, epochs=1, steps=6
    )
    for _ in range(2):
        model.fit(x, y, 1, 1, 0, callbacks, shuffle=False)
    assert weight(model) == pytest.approx(2.46, abs=1e-6)
    with pytest.raises(RuntimeError, match="seen"):
        model.fit(
            x,
            y,
            1,
            1,
            0,
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: (_ for _ in ()).throw(
                    RuntimeError("seen")
                )
            ),
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("style", ["call", "deferred"])
def test_models_built_by_their_first_batch(style, way, mode):
    if style == "call":
        model = Called(3)
    else:
        model = Stack([keras.layers.Dense(3, kernel_initializer="zeros")])
    batch, options = WAYS[way]
    model.compile(keras.optimizers.SGD(0.1), "mse", **options, **mode)
    x, y, _ = regression_data(37)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)

    layer = keras.layers.Dense(
        3, use_bias=style == "deferred", kernel_initializer="zeros"
    )
    stock = keras.Sequential([keras.Input((5,)), layer])
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    start = stock.get_weights()
    stock.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert distance(model, stock, start) < 2e-6
    assert iterations(model) == 3


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients(way, mode):
    """An embedding's gradient; the reference is made dense (see README)."""

    class Dense(keras.layers.Layer):
        """Reads rows by a product, so that the gradient is dense."""

        def build(self, shape):
            self.table = self.add_weight(shape=(50, 4), name="table")

        def call(self, ids):
            return keras.ops.matmul(
                keras.ops.one_hot(ids, 50, dtype="float32"), self.table
            )

    def build(cls, layer):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(layer(inputs))
        return cls(inputs, keras.layers.Dense(1)(x))

    ids = np.random.default_rng(0).integers(0, 50, size=(37, 6))
    ids[:, 1] = ids[:, 0]  # repeated
    y = ids.mean(1, keepdims=True).astype("float32") / 50
    table = np.random.default_rng(1).normal(size=(50, 4)).astype("float32")

    head = [np.ones((4, 1), "float32"), np.zeros(1, "float32")]

    def run(model, batch, **options):
        model.set_weights([table, *head])
        start = model.get_weights()
        optimizer = keras.optimizers.Adam(0.1, epsilon=1e-3)
        model.compile(optimizer, "mse", **options)
        model.fit(ids, y, batch_size=batch, shuffle=False, verbose=0)
        return start

    stock = build(keras.Model, Dense())
    start = run(stock, 16)
    ours = build(Net, keras.layers.Embedding(50, 4))
    batch, options = WAYS[way]
    run(ours, batch, **options, **mode)
    assert distance(ours, stock, start) < 5e-6


@pytest.mark.parametrize("way", WAYS)
def test_mixed_precision_skips_a_window_once(way, mode):
    """A non-finite micro-batch costs its window and halves the scale once."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = one_weight()
        batch, options = {
            "across": (1, {"accumulation_steps": 4}),
            "within": (4, {"micro_batch_size": 1}),
        }[way]
        model.compile(keras.optimizers.SGD(0.1), "mse", **options, **mode)
    finally:
        keras.config.set_dtype_policy("float32")
    fit(model, 0.1, 0.2, 0.3, 0.4, batch_size=batch)
    assert weight(model) == pytest.approx(0.05, abs=1e-4)
    scale = float(model.optimizer.dynamic_scale.numpy())
    fit(model, 0.1, np.inf, 0.3, 0.4, batch_size=batch)
    assert weight(model) == pytest.approx(0.05, abs=1e-4)
    assert model.optimizer_steps == 1
    assert float(model.optimizer.dynamic_scale.numpy()) == scale / 2
    fit(model, 0.05, 0.05, 0.05, 0.45, batch_size=batch)
    assert weight(model) == pytest.approx(0.07, abs=1e-4)
    assert model.optimizer_steps == 2


def test_float16_does_not_overflow_by_the_weight():
    """Many tokens in a micro-batch: the loss is not multiplied by them."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inputs = keras.Input((512,))
        model = Net(inputs, keras.layers.Dense(512)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=2)
    finally:
        keras.config.set_dtype_policy("float32")
    x = np.random.default_rng(0).normal(size=(64, 512)).astype("float32")
    model.fit(x, x, batch_size=16, verbose=0)
    assert model.optimizer_steps == 2  # none was skipped


def test_bfloat16_variables_accumulate_in_float32():
    """1 + 2^-9, a step that bfloat16 sums would lose."""
    model = Stack(
        [
            keras.Input((1,), dtype="bfloat16"),
            keras.layers.Dense(
                1,
                use_bias=False,
                kernel_initializer="zeros",
                dtype="bfloat16",
            ),
        ]
    )
    steps = 257
    model.compile(
        keras.optimizers.SGD(1.0),
        lambda y, p: -keras.ops.mean(keras.ops.cast(p, "float32")),
        accumulation_steps=steps,
    )
    fit(model, *[1] * steps)
    # 257 ones are 256 if summed in bfloat16: the mean would be 0.996.
    assert float(np.float32(model.get_weights()[0].squeeze())) == 1.0


def test_seeds_and_statistics_advance_per_piece():
    """As stock Keras would with the pieces as batches."""

    def build(cls):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        x = keras.layers.BatchNormalization(momentum=0.5)(inputs)
        x = keras.layers.Dropout(0.5, seed=3)(x)
        return cls(inputs, keras.layers.Dense(3)(x))

    x, y, _ = regression_data(12)
    ours, stock = build(Net), build(keras.Model)
    ours.compile(keras.optimizers.SGD(0.0), "mse", micro_batch_size=4)
    stock.compile(keras.optimizers.SGD(0.0), "mse")
    ours.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    stock.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(
        ours.non_trainable_weights, stock.non_trainable_weights, strict=True
    ):
        assert np.abs(a.numpy()).max() > 0
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)
    seeds = [
        [v.numpy() for v in m.variables if "seed" in v.path]
        for m in (ours, stock)
    ]
    assert len(seeds[0]) == 1
    np.testing.assert_array_equal(*seeds)


def test_loading_weights_empties_the_window(tmp_path):
    model = one_weight()
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    path = tmp_path / "w.weights.h5"
    model.save_weights(path)
    model.train_on_batch(ones(1), column(9))
    model.load_weights(path)
    assert model.open_micro_batches == 0
    fit(model, 1, 2, 3, 4)
    assert weight(model) == pytest.approx(0.5)


def test_compile_empties_the_window():
    model = one_weight()
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    model.train_on_batch(ones(1), column(9))
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    assert model.open_micro_batches == 0
    fit(model, 1, 2, 3, 4)
    assert weight(model) == pytest.approx(0.5)


@pytest.mark.parametrize("way", WAYS)
def test_train_step_is_traced_at_most_twice(way):
    traces = []

    class Counting(Net):
        def train_step(self, *args):
            traces.append(1)
            return super().train_step(*args)

    model = mlp(Counting)
    batch, options = WAYS[way]
    model.compile("sgd", "mse", **options)
    x, y, _ = regression_data(37)
    model.fit(
        x, y, batch_size=batch, epochs=3, validation_data=(x, y), verbose=0
    )
    if keras.config.backend() != "torch":
        assert 1 <= len(traces) <= 2
