"""`loss_over="batch"`: any loss on the outputs is that of the large batch."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops
from models import (
    Net,
    Stack,
    distance,
    fit_in_order,
    iterations,
    mlp,
    regression_data,
    tagger,
    token_data,
)

import accumkit
from accumkit import kept_state, unlike_passes
from accumkit.callbacks import EffectiveStepLogger

TOLERANCE = 2e-6
BATCH = 16


def sgd():
    return keras.optimizers.SGD(0.1)


class Plain(accumkit.AccumulationMixin, keras.Model):
    """`Net` is Functional for good once it was given inputs and outputs."""


def subclassed(cls):
    """What to derive a model in `call()` style from."""
    return Plain if cls is Net else keras.Model


def two_towers(cls):
    """InfoNCE with a learnt temperature, in `compute_loss`; a dict out."""

    class Towers(subclassed(cls)):
        def __init__(self):
            super().__init__()
            self.left = keras.layers.Dense(4, activation="tanh")
            self.right = keras.layers.Dense(4, activation="tanh")
            self.temperature = self.add_weight(
                shape=(), initializer="ones", name="temperature"
            )

        def call(self, x):
            a, b = self.left(x[:, :3]), self.right(x[:, 2:])
            return {"b": {"inner": b}, "a": a}

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            a = ops.normalize(ops.cast(y_pred["a"], "float32"), axis=-1)
            b = ops.cast(y_pred["b"]["inner"], "float32")
            logits = ops.matmul(a, ops.transpose(b)) * self.temperature
            labels = ops.arange(ops.shape(logits)[0])
            values = keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            return ops.mean(values)

    keras.utils.set_random_seed(3)
    return Towers()


def supervised_contrastive(y_true, y_pred):
    """One number for the batch, as a loss function returns it."""
    z = ops.normalize(y_pred, axis=-1)
    logits = ops.matmul(z, ops.transpose(z)) / 0.5
    y = ops.reshape(y_true[:, 0] > 0, (-1, 1))
    same = ops.cast(ops.equal(y, ops.transpose(y)), logits.dtype)
    losses = ops.logsumexp(logits, axis=1) - ops.sum(same * logits, 1) / (
        ops.sum(same, 1)
    )
    return ops.mean(losses)


def away_from_zero(y_true, y_pred):
    """The same where dropout may leave nothing of a sample."""
    return supervised_contrastive(y_true, y_pred + 0.1)


def squashed(cls):
    """Outputs between 0 and 1, for Dice."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, activation="tanh")(inputs)
    return cls(inputs, keras.layers.Dense(3, activation="sigmoid")(x))


def two_heads(cls):
    """One output a token, masked, and one for the sequence."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(11, 4, mask_zero=True)(inputs)
    tokens = keras.layers.Dense(3, name="tokens")(x)
    mean = keras.layers.GlobalAveragePooling1D()(x)
    return cls(inputs, [tokens, keras.layers.Dense(2, name="whole")(mean)])


class AddsLosses(keras.layers.Layer):
    """A mean, and a value per sample."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        self.add_loss(0.03 * ops.sum(ops.abs(x), axis=-1))
        return x


def adding(cls):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, activity_regularizer="l2")(inputs)
    return cls(inputs, keras.layers.Dense(3)(AddsLosses()(x)))


def cross_entropy(reduction):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def regression():
    return regression_data(40)[:2]


def segmentation():
    x, y, _ = regression_data(40)
    return x, (y > 0.8).astype("float32")


def tokens():
    return token_data(40)


def tokens_and_whole():
    x, y = token_data(40)
    return x, [y, np.random.default_rng(1).normal(size=(40, 2))]


def weighted_tokens():
    x, y = token_data(40)
    return x, y, np.random.default_rng(1).uniform(0.1, 3, size=(40, 6))


# (model, loss, data, is accumulation wrong without `loss_over`)
LOSSES = {
    "InfoNCE": (two_towers, None, regression, True),
    "supervised contrastive": (
        mlp,
        lambda: supervised_contrastive,
        regression,
        True,
    ),
    "Dice": (squashed, keras.losses.Dice, segmentation, True),
    "Tversky": (squashed, keras.losses.Tversky, segmentation, True),
    "unlike masks": (
        two_heads,
        lambda: [cross_entropy("sum_over_batch_size"), "mse"],
        tokens_and_whole,
        False,
    ),
    "sum and mean": (
        two_heads,
        lambda: [cross_entropy("sum"), "mse"],
        tokens_and_whole,
        None,
    ),
    "mse": (mlp, lambda: "mse", regression, False),
    "added losses": (adding, lambda: "mse", regression, False),
    "masks": (
        tagger,
        lambda: cross_entropy("sum_over_batch_size"),
        tokens,
        False,
    ),
    **{
        f"weights, {reduction}": (
            tagger,
            lambda reduction=reduction: cross_entropy(reduction),
            weighted_tokens,
            False,
        )
        for reduction in (
            "sum",
            "sum_over_batch_size",
            "mean",
            "mean_with_sample_weight",
        )
    },
}


# So that the weights move by about as much as they are large.
RATES = {"Dice": 3.0, "Tversky": 3.0, "sum and mean": 0.01}
RATES["weights, sum"] = 0.002


def train(build, cls, loss, data, **options):
    model = build(cls)
    optimizer = options.pop("optimizer", None)
    batch = options.pop("batch_size", BATCH)
    epochs = options.pop("epochs", 2)
    model.compile(
        optimizer or keras.optimizers.SGD(options.pop("rate", 0.1)),
        loss() if loss else None,
        **options,
    )
    # Variables that the first batch makes.
    model(data[0][:2])
    start, logs = fit_in_order(model, data, batch, epochs=epochs)
    return model, start, logs


# Each loss with ragged pieces; some in the core, and with other pieces.
CORE = ("InfoNCE", "Dice", "unlike masks", "added losses", "weights, mean")
FULL = pytest.mark.full
LOSSES_AND_SIZES = [
    *(
        pytest.param(name, 5, marks=() if name in CORE else FULL)
        for name in LOSSES
    ),
    *(
        pytest.param(name, size, marks=FULL)
        for name in CORE[::3]
        for size in (4, 1)
    ),
]


@pytest.mark.parametrize(("name", "size"), LOSSES_AND_SIZES)
def test_any_loss_is_that_of_the_large_batch(name, size, mode):
    build, loss, data, couples = LOSSES[name]
    data, rate = data(), RATES.get(name, 0.1)
    stock, start, expected = train(
        build, keras.Model, loss, data, rate=rate, **mode
    )
    ours, _, logs = train(
        build,
        Net,
        loss,
        data,
        rate=rate,
        micro_batch_size=size,
        loss_over="batch",
        **mode,
    )
    assert iterations(ours) == iterations(stock) == 6
    assert distance(ours, stock, start) < TOLERANCE
    assert logs.keys() == expected.keys()
    for key, values in expected.items():
        if key == "loss" or keras.config.backend() != "tensorflow":
            # On TensorFlow stock `fit` averages an output's over batches.
            np.testing.assert_allclose(logs[key], values, rtol=1e-5)
    if couples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            naive, _, _ = train(
                build,
                Net,
                loss,
                data,
                rate=rate,
                micro_batch_size=size,
                **mode,
            )
        assert distance(naive, stock, start) > 0.1


@pytest.mark.parametrize("size", [16, 100])
def test_a_batch_in_one_piece_is_stock(size):
    build, loss, data, _ = LOSSES["InfoNCE"]
    stock, start, _ = train(build, keras.Model, loss, data())
    ours, _, _ = train(
        build, Net, loss, data(), micro_batch_size=size, loss_over="batch"
    )
    limit = 0 if keras.config.backend() != "tensorflow" else TOLERANCE
    assert distance(ours, stock, start) <= limit


def test_adam_and_class_weights():
    x, y = regression()
    labels = y.argmax(axis=1)

    def run(cls, **options):
        model = mlp(cls)
        adam = keras.optimizers.Adam(0.02, epsilon=1e-3)
        model.compile(adam, cross_entropy("mean"), **options)
        weights = {0: 0.2, 1: 1.0, 2: 5.0}
        start, _ = fit_in_order(model, (x, labels), BATCH, class_weight=weights)
        return model, start

    stock, start = run(keras.Model)
    ours, _ = run(Net, micro_batch_size=3, loss_over="batch")
    assert distance(ours, stock, start) < TOLERANCE
    wrong, _ = run(Net, micro_batch_size=3, weighting="uniform")
    assert distance(wrong, stock, start) > 0.01


def test_the_temperature_counts_once():
    """Peers add its gradient once a piece: N times too large."""
    build, loss, data, _ = LOSSES["InfoNCE"]
    x, y = (part[:BATCH] for part in data())
    moved = []
    for cls, options in (
        (keras.Model, {}),
        (Net, {"micro_batch_size": 2, "loss_over": "batch"}),
    ):
        model, _, _ = train(build, cls, loss, (x, y), epochs=1, **options)
        moved.append(float(ops.convert_to_numpy(model.temperature)) - 1.0)
    assert abs(moved[0]) > 1e-4
    np.testing.assert_allclose(moved[1] / moved[0], 1.0, atol=1e-3)


def test_metrics_see_the_whole_batch(mode):
    """AUC and recall at a precision are no means over pieces."""

    def run(cls, **options):
        model = squashed(cls)
        model.compile(
            sgd(),
            keras.losses.Dice(),
            metrics=[keras.metrics.AUC(name="auc"), "mae"],
            **options,
            **mode,
        )
        return fit_in_order(model, segmentation(), BATCH)[1]

    expected = run(keras.Model)
    logs = run(Net, micro_batch_size=5, loss_over="batch")
    assert logs.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values, rtol=1e-5)


def normalized(cls, size):
    """BatchNormalization and dropout, run in pieces of `size` in one graph."""

    class Model(subclassed(cls)):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential(
                [
                    keras.layers.Dense(8),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.5, seed=5),
                    keras.layers.Dense(4),
                ]
            )

        def build(self, shape):
            self.net.build(shape)

        def call(self, x, training=False):
            if size is None:
                return self.net(x, training=training)
            pieces = [x[i : i + size] for i in range(0, BATCH, size)]
            outputs = [self.net(piece, training=training) for piece in pieces]
            return ops.concatenate(outputs)

    keras.utils.set_random_seed(3)
    model = Model()
    model.build((None, 5))
    return model


def nothing_put_back(monkeypatch):
    """The second pass goes on from where the first one ended."""
    if keras.config.backend() != "jax":
        monkeypatch.setattr(kept_state.Snapshot, "put_back", lambda _: None)
        return
    # There it is handed the old values: move the seeds on.
    from jax import numpy as jnp

    from accumkit.backends.jax import pieces

    loop = pieces.loop

    def moved(body, carry, full):
        if len(carry) == 3:
            (others, metrics), *rest = carry
            others = [
                v + 7 if jnp.issubdtype(v.dtype, jnp.integer) else v
                for v in others
            ]
            carry = ((others, metrics), *rest)
        return loop(body, carry, full)

    monkeypatch.setattr(pieces, "loop", moved)


@pytest.mark.parametrize("size", [6, 8])
def test_state_is_put_back_between_the_passes(size, mode, monkeypatch):
    """As one graph over the pieces: each draws the masks it drew before."""
    x, y = (part[:BATCH] for part in regression())

    def run(cls, inner, epochs=3, **options):
        model = normalized(cls, inner)
        model.compile(sgd(), away_from_zero, **options, **mode)
        start, _ = fit_in_order(model, (x, y), BATCH, epochs=epochs)
        return model, start

    options = {"micro_batch_size": size, "loss_over": "batch"}
    stock, start = run(keras.Model, size)
    ours, _ = run(Net, None, **options)
    assert distance(ours, stock, start) < 5e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        naive, _ = run(Net, None, micro_batch_size=size)
    assert distance(naive, stock, start) > 0.1
    nothing_put_back(monkeypatch)
    with pytest.raises(ValueError, match="runs the model forward twice"):
        run(Net, None, **options)
    monkeypatch.setattr(unlike_passes.PassComparison, "note", lambda *_: None)
    wrong, _ = run(Net, None, **options)
    assert distance(wrong, stock, start) > 0.1


@pytest.mark.parametrize("size", [6, 8])
def test_state_after_a_step_is_that_of_the_forward_pass(size, mode):
    """Seeds and moving averages to the bit, where the same ops run."""
    x, y = (part[:BATCH] for part in regression())
    states = []
    for cls, inner, options in (
        (keras.Model, size, {}),
        (Net, None, {"micro_batch_size": size, "loss_over": "batch"}),
    ):
        model = normalized(cls, inner)
        model.compile(sgd(), away_from_zero, **options, **mode)
        start, _ = fit_in_order(model, (x, y), BATCH, epochs=1)
        states.append(
            [ops.convert_to_numpy(v) for v in model.non_trainable_variables]
        )
    assert np.abs(states[0][0] - start[4]).max() > 1e-3
    for expected, ours in zip(*states, strict=True):
        # XLA, which loops over pieces on JAX in eager mode as well, fuses one
        # program otherwise.
        if mode.get("jit_compile") or keras.config.backend() == "jax":
            np.testing.assert_allclose(ours, expected, rtol=5e-7, atol=1e-8)
        else:
            np.testing.assert_array_equal(ours, expected)


class Noisy(keras.layers.Layer):
    """Draws past Keras, anew whenever it runs or is traced."""

    def call(self, x):
        noise = np.random.normal(size=5)
        return x + ops.convert_to_tensor(noise, "float32")


def test_randomness_past_keras_raises_once():
    keras.utils.set_random_seed(3)
    model = Stack([keras.Input((5,)), Noisy(), keras.layers.Dense(3)])
    model.compile(sgd(), "mse", micro_batch_size=4, loss_over="batch")
    x, y = regression()
    with pytest.raises(ValueError, match=r"differ by [\d.]+ of their largest"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    with pytest.raises(ValueError, match=r"keras\.random"):
        model.train_on_batch(x[:16], y[:16])
    model.evaluate(x, y, verbose=0)


def test_unseeded_numbers_of_keras_are_drawn_again(mode):
    """Dropout without a seed, and Keras's global generator."""

    class Unseeded(keras.layers.Layer):
        def call(self, x):
            if keras.config.backend() == "jax":
                return x
            return x + keras.random.normal((5,))

    model = Stack(
        [
            keras.Input((5,)),
            Unseeded(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    model.compile(sgd(), "mse", micro_batch_size=4, loss_over="batch", **mode)
    start, logs = fit_in_order(model, regression(), BATCH)
    assert np.isfinite(logs["loss"]).all()
    assert np.abs(model.get_weights()[0] - start[0]).max() > 1e-3


class Coupled(keras.layers.Layer):
    def call(self, x):
        return ops.matmul(x, ops.transpose(x))


def test_a_model_that_couples_samples_is_refused(mode):
    model = Net(i := keras.Input((5,)), Coupled()(keras.layers.Dense(3)(i)))
    model.compile(
        sgd(),
        lambda y, logits: ops.mean(logits),
        micro_batch_size=4,
        loss_over="batch",
        **mode,
    )
    # Not only the first time. On JAX an error takes the values along, as in
    # stock Keras.
    for _ in range(1 if keras.config.backend() == "jax" else 2):
        with pytest.raises(ValueError, match="make the logits in"):
            model.fit(*regression(), batch_size=BATCH, verbose=0)


@pytest.mark.backend("tensorflow", "jax")
@pytest.mark.parametrize("known", [True, False])
def test_several_steps_in_one_execution(known):
    """Also where the data ends in the middle of one."""
    x, y = regression()

    def batches():
        for start in range(0, 40, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    def run(cls, **options):
        model = mlp(cls)
        model.compile(
            sgd(), supervised_contrastive, steps_per_execution=2, **options
        )
        start = model.get_weights()
        if known:
            fit_in_order(model, (x, y), BATCH, epochs=1)
        else:
            # A generator cannot say how much it has.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(batches(), verbose=0)
        return model, start

    stock, start = run(keras.Model)
    ours, _ = run(Net, micro_batch_size=5, loss_over="batch")
    assert iterations(ours) == ours.optimizer_steps >= 3
    assert distance(ours, stock, start) < TOLERANCE


def test_batches_are_averaged_over_a_window():
    """`accumulation_steps` on top: each batch has its own loss."""

    def build(cls):
        model = two_towers(cls)
        if cls is Net:
            return model
        whole = model.compute_loss

        def halves(x=None, y=None, y_pred=None, *args, **kwargs):
            parts = [
                keras.tree.map_structure(lambda v, a=a: v[a : a + 8], y_pred)
                for a in (0, 8)
            ]
            return sum(whole(y_pred=part) for part in parts) / 2

        model.compute_loss = halves
        return model

    x, y = (part[:32] for part in regression())
    stock, start, _ = train(build, keras.Model, None, (x, y))
    ours, _, _ = train(
        build,
        Net,
        None,
        (x, y),
        batch_size=8,
        accumulation_steps=2,
        micro_batch_size=3,
        loss_over="batch",
    )
    assert iterations(ours) == iterations(stock) == 4
    assert distance(ours, stock, start) < TOLERANCE


def test_mixed_float16(mixed_float16):
    """The gradient by the outputs carries the loss scale."""
    build, loss, data, _ = LOSSES["InfoNCE"]

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)

    stock, start, _ = train(
        build, keras.Model, loss, data(), optimizer=optimizer()
    )
    ours, _, _ = train(
        build,
        Net,
        loss,
        data(),
        optimizer=optimizer(),
        micro_batch_size=5,
        loss_over="batch",
    )
    assert distance(ours, stock, start) < 5e-3
    naive, _, _ = train(
        build, Net, loss, data(), optimizer=optimizer(), micro_batch_size=5
    )
    assert distance(naive, stock, start) > 0.1


def native_contrastive(y_true, y_pred):
    """In the dtype of the outputs, on JAX as well."""
    z = y_pred - ops.mean(y_pred, axis=0)
    logits = ops.matmul(z, ops.transpose(z))
    return ops.mean(ops.log(ops.sum(ops.exp(logits), axis=1))) + ops.sum(
        ops.square(z - y_true)
    ) / (1 + ops.sum(ops.square(z)))


@pytest.mark.backend("tensorflow", "jax")
def test_float64_is_exact_to_12_digits():
    """Not on torch, where Keras's matrix product is float32."""

    def run(cls, **options):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,), dtype="float64")
        outputs = keras.layers.Dense(3, dtype="float64")(inputs)
        model = cls(inputs, outputs)
        model.compile(sgd(), native_contrastive, **options)
        x, y, _ = regression_data(40, dtype="float64")
        start, _ = fit_in_order(model, (x, y), BATCH)
        return model, start

    if keras.config.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    try:
        stock, start = run(keras.Model)
        ours, _ = run(Net, micro_batch_size=5, loss_over="batch")
        assert distance(ours, stock, start) < 1e-12
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            naive, _ = run(Net, micro_batch_size=5)
        assert distance(naive, stock, start) > 0.1
    finally:
        keras.config.set_floatx("float32")
        if keras.config.backend() == "jax":
            jax.config.update("jax_enable_x64", False)


def test_the_step_log_counts_pieces_and_has_the_loss():
    logger = EffectiveStepLogger()
    model = squashed(Net)
    model.compile(
        sgd(), keras.losses.Dice(), micro_batch_size=5, loss_over="batch"
    )
    x, y = segmentation()
    fit_in_order(model, (x, y), BATCH, epochs=1, callbacks=[logger])
    assert list(logger.frame["micro_batches"]) == [4, 8, 10]
    assert list(logger.frame["samples"]) == [16, 16, 8]
    fresh = squashed(keras.Model)
    fresh.compile(sgd(), keras.losses.Dice())
    expected = fresh.evaluate(x[:16], y[:16], batch_size=16, verbose=0)
    np.testing.assert_allclose(logger.frame["loss"][0], expected, rtol=1e-5)


def test_compiled_again_and_in_a_file(tmp_path):
    """Another loss, back to pieces, and a file that keeps the option."""
    model, x, y = mlp(Net), *regression()
    options = {"micro_batch_size": 5, "loss_over": "batch"}
    model.compile(sgd(), "mse", **options)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    for loss, again in (("mae", options), ("mae", {"micro_batch_size": 5})):
        stock = mlp(keras.Model)
        stock.set_weights(model.get_weights())
        stock.compile(sgd(), loss)
        model.compile(sgd(), loss, **again)
        start, _ = fit_in_order(stock, (x, y), BATCH)
        fit_in_order(model, (x, y), BATCH)
        assert distance(model, stock, start) < TOLERANCE
    model.compile(sgd(), "mse", **options)
    assert len(model.variables) == len(mlp(keras.Model).variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_compile_config() == model.get_compile_config()
    assert "loss_over" in str(loaded.get_compile_config())
    assert loaded.get_state_tree().keys() == stock.get_state_tree().keys()


def test_what_it_needs_is_said_at_compile():
    model = mlp(Net)
    with pytest.raises(ValueError, match="needs `micro_batch_size`"):
        model.compile(sgd(), "mse", loss_over="batch")
    with pytest.raises(ValueError, match="`loss_over` must be one of"):
        model.compile(sgd(), "mse", micro_batch_size=4, loss_over="window")
