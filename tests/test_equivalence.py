"""The weights of the large batch: a matrix, each with a negative control."""

import contextlib

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

import accumkit

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "slow sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.02, epsilon=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(
        0.02, weight_decay=0.05, global_clipnorm=0.3, epsilon=1e-3
    ),
    "ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    ),
    "lion": lambda: keras.optimizers.Lion(0.01),
}
# Float32: a few units in the last place of the largest step. Lion takes the
# sign of a gradient, so that nothing in between exists.
TOLERANCE = 2e-6

# (samples, batch of `fit`, options): the large batch always has 16.
PARTITIONS = {
    "across": (48, 4, {"accumulation_steps": 4}),
    "across, ragged": (37, 4, {"accumulation_steps": 4}),
    "within": (48, 16, {"micro_batch_size": 4}),
    "within, ragged": (37, 16, {"micro_batch_size": 5}),
    "both, ragged": (37, 8, {"accumulation_steps": 2, "micro_batch_size": 3}),
}


def train(model, data, batch_size, optimizer, loss="mse", epochs=2, **kwargs):
    model.compile(optimizer, loss, **kwargs)
    return fit_in_order(model, data, batch_size, epochs)


def compare(build, data, partition, optimizer, loss, mode):
    """Distance of the accumulated and of a wrongly weighted run."""
    _, batch, options = PARTITIONS[partition]
    stock, ours, wrong = build(keras.Model), build(Net), build(Net)
    start, _ = train(stock, data, 16, OPTIMIZERS[optimizer](), loss)
    train(ours, data, batch, OPTIMIZERS[optimizer](), loss, **options, **mode)
    assert iterations(ours) == iterations(stock) > 0
    assert ours.open_micro_batches == 0
    train(
        wrong,
        data,
        batch,
        OPTIMIZERS[optimizer](),
        loss,
        weighting="uniform",
        **options,
    )
    return distance(ours, stock, start), distance(wrong, stock, start)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(
    "optimizer", [o for o in OPTIMIZERS if o != "slow sgd"]
)
def test_every_optimizer_and_partition(optimizer, partition):
    samples = PARTITIONS[partition][0]
    ours, wrong = compare(
        mlp, regression_data(samples), partition, optimizer, "mse", {}
    )
    assert ours < TOLERANCE
    if "ragged" in partition:
        assert wrong > 100 * TOLERANCE


@pytest.mark.parametrize("partition", ["across, ragged", "within, ragged"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_way_to_run(mode, optimizer, partition):
    ours, wrong = compare(
        mlp, regression_data(37), partition, optimizer, "mse", mode
    )
    assert ours < TOLERANCE < 100 * TOLERANCE < wrong


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
)
@pytest.mark.parametrize("partition", ["across, ragged", "both, ragged"])
@pytest.mark.parametrize("weights", [False, True])
def test_every_reduction(reduction, partition, weights):
    x, y, sample_weight = regression_data(37)
    data = (x, y / 8, sample_weight) if weights else (x, y / 8)

    def loss():
        return keras.losses.MeanSquaredError(reduction=reduction)

    ours, wrong = compare(mlp, data, partition, "sgd", loss(), {})
    assert ours < TOLERANCE < 100 * TOLERANCE < wrong


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
)
@pytest.mark.parametrize("partition", ["across", "within, ragged"])
@pytest.mark.parametrize("weights", [False, True])
def test_masked_tokens(reduction, partition, weights):
    x, y = token_data(PARTITIONS[partition][0])
    rng = np.random.default_rng(2)
    data = (x, y)
    if weights:
        data += (rng.uniform(0.1, 2, size=x.shape).astype("float32"),)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    optimizer = "slow sgd" if reduction == "sum" else "sgd"
    ours, wrong = compare(tagger, data, partition, optimizer, loss, {})
    assert ours < 2 * TOLERANCE  # sums of up to 96 tokens
    assert wrong > 100 * TOLERANCE


def test_classes_that_the_loss_ignores():
    x, y = token_data(48)
    y[x % 3 == 0] = -1
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1
    )
    ours, wrong = compare(tagger, (x, y), "across", "sgd", loss, {})
    assert ours < 2 * TOLERANCE
    assert wrong > 100 * TOLERANCE


def test_class_weight():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(37, 5)).astype("float32")
    y = rng.integers(0, 3, size=37)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(cls, batch, **options):
        model = mlp(cls)
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
        start = model.get_weights()
        model.fit(
            x,
            y,
            batch_size=batch,
            class_weight={0: 0.2, 1: 1.0, 2: 5.0},
            shuffle=False,
            verbose=0,
        )
        return model, start

    stock, start = run(keras.Model, 16)
    ours, _ = run(Net, 4, accumulation_steps=4)
    wrong, _ = run(Net, 4, accumulation_steps=4, weighting="uniform")
    assert distance(ours, stock, start) < TOLERANCE
    assert distance(wrong, stock, start) > 100 * TOLERANCE


def native_mse(y_true, y_pred):
    """A mean over the samples, in operators of the framework."""
    difference = y_true - y_pred
    return (difference * difference).sum() / (3 * difference.shape[0])


@pytest.mark.backend("tensorflow", "jax")
# `native_mse` is one number, a plain mean.
@pytest.mark.filterwarnings("ignore:The loss of '.*' returns one number")
def test_float64():
    """To the last bits, wherever Keras itself computes in float64.

    On JAX Keras 3.15 computes its losses, Adam and others in float32 whatever
    the dtype; a linear model with SGD has none of that. On torch even its
    matrix product is float32.
    """
    build, optimizer, loss = mlp, "adam", "mse"
    if keras.config.backend() != "tensorflow":
        optimizer, loss = "sgd", native_mse

        def build(cls, dtype):
            keras.utils.set_random_seed(3)
            inputs = keras.Input((5,), dtype=dtype)
            return cls(inputs, keras.layers.Dense(3, dtype=dtype)(inputs))

    before = keras.config.floatx()
    if keras.config.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    try:
        data = regression_data(37, dtype="float64")[:2]
        ours, wrong = compare(
            lambda cls: build(cls, dtype="float64"),
            data,
            "both, ragged",
            optimizer,
            loss,
            {},
        )
    finally:
        keras.config.set_floatx(before)
        if keras.config.backend() == "jax":
            jax.config.update("jax_enable_x64", False)
    assert ours < 1e-12
    assert wrong > 1e-3


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}])
def test_logs_are_those_of_the_large_batch(options):
    """Within a batch every log is; across, the mean over samples is."""
    if options and keras.config.backend() == "torch":
        options = {}  # Keras has no `steps_per_execution` there
    data = regression_data(48)
    stock, within, across = mlp(keras.Model), mlp(Net), mlp(Net)
    args = {"metrics": ["mae"], "weighted_metrics": ["mse"]}

    def optimizer():
        return keras.optimizers.SGD(0.1)

    _, expected = train(stock, data, 16, optimizer(), **args)
    _, logs = train(
        within, data, 16, optimizer(), micro_batch_size=5, **args, **options
    )
    assert logs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    _, logs = train(
        across, data, 4, optimizer(), accumulation_steps=4, **args, **options
    )
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)


def test_unfrozen_and_unused_variables():
    """A variable without gradient stays None: decay must not move it."""

    def build(cls):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        first = keras.layers.Dense(4, name="first")
        model = cls(inputs, keras.layers.Dense(3)(first(inputs)))
        model.unused = model.add_weight(shape=(2,), initializer="ones")
        return model

    def run(model, batch, **options):
        for trainable in (False, True):
            model.get_layer("first").trainable = trainable
            optimizer = keras.optimizers.SGD(
                0.1, momentum=0.9, weight_decay=0.1
            )
            model.compile(optimizer, "mse", **options)
            x, y, _ = regression_data(37)
            with warns:
                model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model

    # JAX has no None: stock Keras decays an unused variable there, and so
    # does a window.
    jax = keras.config.backend() == "jax"
    warns = pytest.warns(UserWarning, match="Gradients do not exist")
    if jax:
        warns = contextlib.nullcontext()

    start = build(keras.Model).get_weights()
    stock = run(build(keras.Model), 16)
    ours = run(build(Net), 4, accumulation_steps=4)
    assert distance(ours, stock, start) < TOLERANCE
    np.testing.assert_allclose(
        ours.unused.numpy(), stock.unused.numpy(), rtol=1e-6
    )
    assert (ours.unused.numpy()[0] == 1) != jax
    wrong = run(build(Net), 4, accumulation_steps=4, weighting="uniform")
    assert distance(wrong, stock, start) > 100 * TOLERANCE


def test_sum_counts_penalties_once():
    """Without division a penalty must not be counted per micro-batch."""
    x, y, _ = regression_data(37)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    stock, ours = mlp(keras.Model), mlp(Net)
    start, _ = train(stock, (x, y / 8), 16, "sgd", loss)
    train(ours, (x, y / 8), 4, "sgd", loss, accumulation_steps=4)
    assert distance(ours, stock, start) < TOLERANCE

    class TooOften(Net):
        def compute_loss(self, *args, **kwargs):
            extra = 3 * sum(self.losses)
            return super().compute_loss(*args, **kwargs) + extra

    wrong = mlp(TooOften)
    train(wrong, (x, y / 8), 16, "sgd", loss, micro_batch_size=16)
    assert distance(wrong, stock, start) > 100 * TOLERANCE


def test_own_loss_and_accumulation_weight():
    """The hook says what a loss of one's own was divided by."""

    def build(base, hook):
        class Own(base):
            def compute_loss(
                self, x, y, y_pred, sample_weight=None, training=True
            ):
                known = keras.ops.cast(y[:, :1] > 0, "float32")
                values = keras.ops.square(y - y_pred) * known
                return keras.ops.sum(values) / keras.ops.sum(known)

        if hook:
            Own.accumulation_weight = lambda self, x, y, p, w: keras.ops.sum(
                keras.ops.cast(y[:, :1] > 0, "float32")
            )
        return mlp(Own)

    x, y, _ = regression_data(48)
    y[:, 0] = np.arange(48) % 5 - 1.5
    runs = {}
    for name, base, hook, batch, options in [
        ("stock", keras.Model, False, 16, {}),
        ("hook", Net, True, 4, {"accumulation_steps": 4}),
        ("hook within", Net, True, 16, {"micro_batch_size": 5}),
        ("samples", Net, False, 4, {"accumulation_steps": 4}),
    ]:
        runs[name] = build(base, hook)
        start, _ = train(runs[name], (x, y), batch, "sgd", None, **options)
    assert distance(runs["hook"], runs["stock"], start) < TOLERANCE
    assert distance(runs["hook within"], runs["stock"], start) < TOLERANCE
    assert distance(runs["samples"], runs["stock"], start) > 100 * TOLERANCE


def two_outputs(cls, masked):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(11, 4, mask_zero=masked)(inputs)
    tokens = keras.layers.Dense(3, name="tokens")(x)
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    label = keras.layers.Dense(2, name="label")(pooled)
    return cls(inputs, {"tokens": tokens, "label": label})


@pytest.mark.parametrize("masked", [False, True])
def test_two_outputs(masked):
    x, y = token_data(37)
    labels = {"tokens": y, "label": y[:, 0] % 2}

    def loss():
        return {
            name: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for name in labels
        }

    def run(cls, batch, **options):
        model = two_outputs(cls, masked)
        model.compile(keras.optimizers.SGD(0.5), loss(), **options)
        start = model.get_weights()
        model.fit(x, labels, batch_size=batch, shuffle=False, verbose=0)
        return model, start

    stock, start = run(keras.Model, 16)
    if masked:
        with pytest.warns(
            accumkit.AccumkitWarning,
            match=r"'tokens' \(mask\), 'label' \(values\)",
        ):
            ours, _ = run(Net, 4, accumulation_steps=4)
        assert distance(ours, stock, start) > 100 * TOLERANCE
    else:
        ours, _ = run(Net, 4, accumulation_steps=4)
        assert distance(ours, stock, start) < TOLERANCE


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (4, {"accumulation_steps": 4}),
        (16, {"micro_batch_size": 4}),
        (16, {"micro_batch_size": 3}),
        (8, {"accumulation_steps": 2, "micro_batch_size": 3}),
    ],
)
def test_logs_of_two_outputs(mode, batch, options):
    """The loss of each output is logged as that of the large batch."""
    x, y, weights = regression_data(40)
    targets = {"a": y, "b": x[:, :1]}

    def build(cls, **options):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        outputs = {
            name: keras.layers.Dense(units, name=name)(inputs)
            for name, units in (("a", 3), ("b", 1))
        }
        model = cls(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 1.0, "b": 0.3},
            metrics={"a": ["mae"]},
            **options,
        )
        return model

    def part(start, end):
        return {
            "y": {name: y[start:end] for name, y in targets.items()},
            "sample_weight": {name: weights[start:end] for name in targets},
        }

    # Batch by batch: on TensorFlow `fit` averages the losses of outputs over
    # batches, where those of one output are averaged over samples.
    stock, expected = build(keras.Model), {}
    start = stock.get_weights()
    for first in range(0, 40, 16):
        stock.reset_metrics()
        x_batch = x[first : first + 16]
        logs = stock.train_on_batch(
            x_batch, **part(first, first + 16), return_dict=True
        )
        for name, value in logs.items():
            share = len(x_batch) / 40
            expected[name] = expected.get(name, 0) + value * share
    assert set(expected) == {"loss", "a_loss", "b_loss", "a_mae"}

    ours = build(Net, **mode, **options)
    logs = ours.fit(
        x,
        **part(0, 40),
        batch_size=batch,
        shuffle=False,
        verbose=0,
    ).history
    assert distance(ours, stock, start) < TOLERANCE
    assert set(logs) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)
    # A last piece of another size that counts as much as the others.
    kernel, bias = start[:2]
    errors = (np.square(x @ kernel + bias - y).mean(1) * weights)[:16]
    naive = np.mean([errors[i : i + 3].mean() for i in range(0, 16, 3)])
    assert abs(naive / errors.mean() - 1) > 1e-3


def test_two_outputs_with_one_mask():
    """Two heads on the same tokens have the same denominator."""

    def build(cls):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(11, 4, mask_zero=True)(inputs)
        a = keras.layers.Dense(3, name="a")(x)
        b = keras.layers.Dense(3, name="b")(x)
        return cls(inputs, [a, b])

    x, y = token_data(37)

    def run(cls, batch, **options):
        model = build(cls)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.5),
            [loss, loss],
            loss_weights=[1, 0.3],
            **options,
        )
        start = model.get_weights()
        model.fit(x, [y, 2 - y], batch_size=batch, shuffle=False, verbose=0)
        return model, start

    stock, start = run(keras.Model, 16)
    ours, _ = run(Net, 4, accumulation_steps=4)
    wrong, _ = run(Net, 4, accumulation_steps=4, weighting="uniform")
    assert distance(ours, stock, start) < 2 * TOLERANCE
    assert distance(wrong, stock, start) > 100 * TOLERANCE


def test_keras_own_option_fails_here():
    """The control of controls: Keras's option misses a ragged window."""
    data = regression_data(37)
    stock, builtin = mlp(keras.Model), mlp(keras.Model)
    start, _ = train(stock, data, 16, keras.optimizers.SGD(0.1))
    train(
        builtin,
        data,
        4,
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=4),
    )
    assert distance(builtin, stock, start) > 1e-2
