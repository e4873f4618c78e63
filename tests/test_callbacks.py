"""BatchNormalization check, schedule adjuster, N by epoch (cases 12, 24)."""

import warnings

import keras
import numpy as np
import pytest
from models import (
    Net,
    Stack,
    fit,
    iterations,
    negative_mean,
    one_weight,
    ones,
    regression_data,
    weight,
)

import accumkit
from accumkit import RescaledSchedule, optimizer_steps
from accumkit.callbacks import (
    AccumulationScheduler,
    BatchNormalizationCheck,
    LearningRateScheduleAdjuster,
)

layers = keras.layers
ExponentialDecay = keras.optimizers.schedules.ExponentialDecay

# Model G's loss is one number, a plain mean: weighting it by samples is right.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The loss of '(negative_mean|lambda)' returns one number"
)


def block(x, name, **kwargs):
    inputs = keras.Input((4,))
    y = layers.BatchNormalization(name=f"{name}_bn", **kwargs)(inputs)
    return keras.Model(inputs, y, name=name)(x)


def nested(x):
    inputs = keras.Input((4,))
    return keras.Model(inputs, block(inputs, "inner"), name="outer")(x)


class Custom(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = [layers.BatchNormalization(name="hidden_bn")]

    def call(self, x):
        return self.hidden[0](x)


def frozen(x):
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layer(x)


FOUND = {
    "top": (lambda x: layers.BatchNormalization(name="a")(x), ["'a'"]),
    "two deep": (nested, ["'outer/inner/inner_bn'"]),
    "custom layer": (lambda x: Custom()(x), ["/hidden_bn'"]),
    "two": (
        lambda x: block(layers.BatchNormalization(name="a")(x), "b"),
        ["'a'", "'b/b_bn'"],
    ),
}
SILENT = {
    "frozen": frozen,
    "layer": lambda x: layers.LayerNormalization()(x),
    "group": lambda x: layers.GroupNormalization(2)(x),
}
if keras.config.backend() == "tensorflow":
    FOUND["synchronized"] = (
        lambda x: layers.BatchNormalization(name="s", synchronized=True)(x),
        ["'s'"],
    )


def network(body):
    inputs = keras.Input((4,))
    return Net(inputs, layers.Dense(1)(body(inputs)))


def train(model, *callbacks, batch_size=2, epochs=1, **options):
    if options or not model.compiled:
        model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    x = regression_data(8)[0][:, :4]
    return model.fit(
        x,
        x[:, :1],
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("where", FOUND)
def test_12_one_warning_names_each_layer(where):
    body, names = FOUND[where]
    model = network(body)
    check = BatchNormalizationCheck()
    with pytest.warns(accumkit.AccumkitWarning) as caught:
        train(model, check, accumulation_steps=4)
    (warning,) = [
        w for w in caught if isinstance(w.message, accumkit.AccumkitWarning)
    ]
    text = str(warning.message)
    assert all(name in text for name in names)
    assert text.startswith(f"{len(names)} active")
    assert "0.99^4 = 0.961" in text
    assert "4 times per optimizer step" in text
    train(model, check)  # said once


@pytest.mark.parametrize("what", SILENT)
def test_12_silent(what):
    train(
        network(SILENT[what]),
        BatchNormalizationCheck(),
        batch_size=2,
        accumulation_steps=4,
    )


def test_12_silent_for_n_of_one():
    model = network(FOUND["top"][0])
    train(model, BatchNormalizationCheck(), accumulation_steps=1)
    train(
        model,
        BatchNormalizationCheck("raise"),
        batch_size=8,
        micro_batch_size=8,
    )


def test_within_a_batch_counts_its_pieces():
    model = network(FOUND["top"][0])
    with pytest.warns(accumkit.AccumkitWarning, match="statistics of 2 samp"):
        train(
            model,
            BatchNormalizationCheck(),
            batch_size=8,
            micro_batch_size=2,
        )
    with pytest.raises(ValueError, match="4 times per optimizer step"):
        train(
            model,
            BatchNormalizationCheck("raise"),
            batch_size=8,
            micro_batch_size=2,
        )


def test_keras_own_option_is_found_too():
    inputs = keras.Input((4,))
    x = layers.BatchNormalization(name="a")(inputs)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.SGD(0.0, gradient_accumulation_steps=4), "mse"
    )
    with pytest.warns(accumkit.AccumkitWarning, match="4 times per optimizer"):
        train(model, BatchNormalizationCheck())


def test_rescaled_momentum_forgets_as_the_large_batch(mode):
    """A window's old average weighs m, as after one large batch."""

    def build(cls):
        inputs = keras.Input((4,))
        x = layers.BatchNormalization(momentum=0.9, name="bn")(inputs)
        return cls(inputs, layers.Dense(1)(x))

    # Constant input: every micro-batch has the statistics of the batch.
    x = np.tile(np.array([[1, 2, 3, 4]], "float32"), (8, 1))
    stock, ours, wrong = build(keras.Model), build(Net), build(Net)
    runs = [
        (stock, 8, {}, []),
        (
            ours,
            2,
            {"accumulation_steps": 4, **mode},
            [BatchNormalizationCheck("rescale_momentum")],
        ),
        (wrong, 2, {"accumulation_steps": 4}, []),
    ]
    for model, batch, options, callbacks in runs:
        model.compile(keras.optimizers.SGD(0.0), "mse", **options)
        model.fit(
            x,
            x[:, :1],
            batch_size=batch,
            epochs=2,
            verbose=0,
            callbacks=callbacks,
        )
    means = [m.get_layer("bn").moving_mean.numpy() for m in (stock, ours)]
    np.testing.assert_allclose(means[0], x[0] * (1 - 0.9**2), rtol=1e-5)
    np.testing.assert_allclose(means[1], means[0], rtol=1e-5)
    off = wrong.get_layer("bn").moving_mean.numpy()
    assert np.abs(off - means[0]).max() > 0.1
    assert ours.get_layer("bn").momentum == 0.9


def test_momentum_is_restored_after_an_exception():
    class Crash(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise RuntimeError("crash")

    model = network(FOUND["top"][0])
    check = BatchNormalizationCheck("rescale_momentum")
    with pytest.raises(RuntimeError, match="crash"):
        train(model, check, Crash(), accumulation_steps=4)
    assert model.get_layer("a").momentum == 0.99


def test_rescaling_follows_n():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(self.model.get_layer("a").momentum)

    model = network(FOUND["top"][0])
    train(
        model,
        AccumulationScheduler({0: 1, 1: 2, 2: 4}),
        BatchNormalizationCheck("rescale_momentum"),
        Look(),
        epochs=3,
        accumulation_steps=1,
    )
    expected = [0.99] * 4 + [0.99 ** (1 / 2)] * 4 + [0.99 ** (1 / 4)] * 4
    np.testing.assert_allclose(seen, expected)
    assert model.get_layer("a").momentum == 0.99


def test_batch_normalization_check_errors():
    with pytest.raises(ValueError, match="`action` must be one of"):
        BatchNormalizationCheck("ignore")
    model = network(FOUND["top"][0])
    with pytest.raises(ValueError, match=r"'a'.*GroupNormalization"):
        train(model, BatchNormalizationCheck("raise"), accumulation_steps=2)
    model.compile("sgd", "mse", micro_batch_size=2)

    def batches():
        while True:
            yield ones(4) * np.ones(4, "float32"), ones(4)

    def fit_generator(check):
        model.fit(
            batches(),
            steps_per_epoch=1,
            shuffle=False,
            verbose=0,
            callbacks=[check],
        )

    with pytest.raises(ValueError, match="`updates_per_optimizer_step`"):
        fit_generator(BatchNormalizationCheck("rescale_momentum"))
    fit_generator(
        BatchNormalizationCheck(
            "rescale_momentum", updates_per_optimizer_step=2
        )
    )


class Rates(keras.callbacks.Callback):
    """The rate with which each optimizer step moved the weight of G."""

    def on_train_begin(self, logs=None):
        self.weights = [weight(self.model)]

    def on_train_batch_end(self, batch, logs=None):
        w = weight(self.model)
        if w != self.weights[-1]:
            self.weights.append(w)

    @property
    def rates(self):
        return np.diff(self.weights)


def g_model(optimizer, **options):
    model = one_weight()
    model.compile(optimizer, negative_mean, **options)
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_24_schedule_written_in_micro_batches(mode, scaled):
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
    optimizer = keras.optimizers.SGD(schedule)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = g_model(optimizer, accumulation_steps=2, **mode)
    fit(model, *[1] * 2)  # traced with the schedule as it was
    first = weight(model)
    adjust, rates = LearningRateScheduleAdjuster(), Rates()
    fit(model, *[1] * 6, callbacks=[adjust, rates])
    expected = [float(schedule(k * 2)) for k in (1, 2, 3)]
    assert first == pytest.approx(0.1, rel=1e-3)
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-3)
    # Never twice, and the user's object is as it was.
    fit(model, *[1] * 2, callbacks=[adjust, rates])
    np.testing.assert_allclose(rates.rates, [float(schedule(8))], rtol=1e-3)
    assert isinstance(schedule, ExponentialDecay)
    inner = optimizer.inner_optimizer if scaled else optimizer
    assert inner._learning_rate.schedule is schedule
    assert not isinstance(inner._learning_rate.schedule, RescaledSchedule)


def test_24_follows_n():
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
    model = g_model(keras.optimizers.SGD(schedule), accumulation_steps=1)
    rates = Rates()
    fit(
        model,
        *[1] * 4,
        epochs=3,
        callbacks=[
            AccumulationScheduler({0: 1, 1: 2, 2: 4}),
            LearningRateScheduleAdjuster(),
            rates,
        ],
    )
    positions = [0, 1, 2, 3, 4, 6, 8]
    expected = [float(schedule(p)) for p in positions]
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-4)


def test_24_written_in_optimizer_steps_is_what_the_mixin_does():
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    model = g_model(keras.optimizers.SGD(schedule), accumulation_steps=2)
    fit(
        model,
        *[1] * 8,
        callbacks=[LearningRateScheduleAdjuster("optimizer_steps")],
    )
    assert weight(model) == pytest.approx(0.1875, abs=1e-6)
    assert model.optimizer._learning_rate is schedule


def test_24_plain_keras_with_its_own_option():
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)

    def run(*callbacks):
        model = one_weight(keras.Sequential)
        model.compile(
            keras.optimizers.SGD(schedule, gradient_accumulation_steps=2),
            negative_mean,
        )
        fit(model, *[1] * 8, callbacks=list(callbacks))
        return weight(model)

    counted = run(LearningRateScheduleAdjuster("optimizer_steps"))
    assert counted == pytest.approx(0.1875, abs=1e-6)
    assert run(LearningRateScheduleAdjuster()) == pytest.approx(run())
    assert run() == pytest.approx(0.0664, abs=1e-4)


def test_24_a_float_rate_is_left_to_others():
    model = g_model(keras.optimizers.SGD(0.1), accumulation_steps=2)
    history = fit(
        model,
        *[1] * 4,
        epochs=3,
        callbacks=[
            LearningRateScheduleAdjuster(),
            keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=0, min_delta=10.0, cooldown=0
            ),
        ],
    )
    rates = history.history["learning_rate"]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] < 0.1


def test_24_reduce_on_plateau_with_a_schedule_says_so():
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
    model = g_model(keras.optimizers.SGD(schedule), accumulation_steps=2)
    reduce = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=0, min_delta=10.0
    )
    with pytest.raises(TypeError, match="learning rate is not settable"):
        fit(
            model,
            *[1] * 4,
            epochs=3,
            callbacks=[LearningRateScheduleAdjuster(), reduce],
        )


def test_saved_with_the_model(tmp_path):
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
    model = g_model(
        keras.optimizers.SGD(schedule, momentum=0.5), accumulation_steps=2
    )
    model.compile(model.optimizer, "mse", accumulation_steps=2)
    before = len(model.optimizer.variables)
    fit(model, *[1] * 4, callbacks=[LearningRateScheduleAdjuster()])
    path = tmp_path / "m.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert len(loaded.optimizer.variables) - before == 1  # the momentum
    assert float(loaded.optimizer.learning_rate) == pytest.approx(
        float(schedule(4)), rel=1e-5
    )
    rates = Rates()
    loaded.compile(loaded.optimizer, negative_mean, accumulation_steps=2)
    fit(loaded, *[1] * 2, callbacks=[LearningRateScheduleAdjuster(), rates])
    config = loaded.optimizer._learning_rate.get_config()
    again = RescaledSchedule.from_config(config)
    assert float(again(3)) == pytest.approx(float(schedule(6)), rel=1e-5)


def test_rescaled_schedule_alone():
    schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    assert float(RescaledSchedule(schedule, 4)(2)) == pytest.approx(0.1 / 256)
    assert float(RescaledSchedule(schedule, 1, 4)(7)) == pytest.approx(0.05)
    with pytest.raises(TypeError, match="`schedule` must be"):
        RescaledSchedule(0.1, 2)
    with pytest.raises(ValueError, match="`multiply`"):
        RescaledSchedule(schedule, 0)
    with pytest.raises(ValueError, match="`written_in` must be one of"):
        LearningRateScheduleAdjuster("epochs")


@pytest.mark.parametrize("remainder", ["apply", "carry", "drop"])
@pytest.mark.parametrize(
    "schedule",
    [{0: 1, 1: 4, 3: 3}, lambda step: 1 + step // 2],
    ids=["epochs", "steps"],
)
def test_scheduler_steps_as_counted(schedule, remainder, mode):
    model = g_model(keras.optimizers.SGD(0.1), remainder=remainder, **mode)
    fit(model, *[1] * 10, epochs=4, callbacks=[AccumulationScheduler(schedule)])
    assert iterations(model) == optimizer_steps(10, schedule, 4, remainder)
    assert weight(model) == pytest.approx(0.1 * iterations(model), rel=1e-5)


def test_scheduler_errors():
    with pytest.raises(ValueError, match="entry for epoch 0"):
        AccumulationScheduler({1: 4})
    with pytest.raises(TypeError, match="dict"):
        AccumulationScheduler(4)
    stock = one_weight(keras.Sequential)
    stock.compile("sgd", "mse")
    with pytest.raises(TypeError, match="AccumulationMixin"):
        fit(stock, 1, 2, callbacks=[AccumulationScheduler({0: 2})])


def test_all_together(tmp_path):
    """Every callback of ours, beside Keras's, in both modes."""
    for options, batch in (
        ({"accumulation_steps": 2}, 2),
        ({"micro_batch_size": 2}, 4),
    ):
        inputs = keras.Input((4,))
        x = layers.BatchNormalization()(inputs)
        model = Net(inputs, layers.Dense(1)(x))
        schedule = ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
        model.compile(keras.optimizers.Adam(schedule), "mse", **options)
        x = regression_data(9)[0][:, :4]
        log = accumkit.callbacks.EffectiveStepLogger()
        model.fit(
            x,
            x[:, :1],
            batch_size=batch,
            epochs=2,
            verbose=0,
            validation_data=(x, x[:, :1]),
            callbacks=[
                BatchNormalizationCheck("rescale_momentum"),
                LearningRateScheduleAdjuster(),
                log,
                keras.callbacks.CSVLogger(tmp_path / "log.csv"),
                keras.callbacks.EarlyStopping(patience=3),
                keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            ],
        )
        assert iterations(model) == len(log.frame) == 6
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save(tmp_path / "m.keras")


def test_stack_has_no_active_layer():
    assert (
        accumkit.batch_statistics.active_layers(Stack([layers.Dense(1)])) == {}
    )
