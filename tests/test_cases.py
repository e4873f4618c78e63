"""Public bug reports about accumulation, as small inputs (cases 1 to 27)."""

import keras
import numpy as np
import pytest
from models import (
    Net,
    Stack,
    column,
    fit,
    iterations,
    negative_mean,
    one_weight,
    ones,
    weight,
)

import accumkit

SGD = keras.optimizers.SGD

# Model G's loss is one number, a plain mean: weighting it by samples is right.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The loss of '(negative_mean|lambda)' returns one number"
)


def compiled(n=1, optimizer=None, loss="mse", **kwargs):
    model = one_weight()
    model.compile(optimizer or SGD(0.1), loss, accumulation_steps=n, **kwargs)
    return model


class WeightLog(keras.callbacks.Callback):
    """Reads the weight after each micro-batch and each epoch."""

    def on_train_begin(self, logs=None):
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(np.float32(weight(self.model)))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(np.float32(weight(self.model)))


@pytest.mark.parametrize(
    ("remainder", "w", "steps", "steps_of_ten"),
    [("apply", 2.46, 4, 9), ("carry", 1.78, 3, 7), ("drop", 0.90, 2, 6)],
)
@pytest.mark.parametrize("validate", [False, True])
def test_01_remainder(mode, remainder, w, steps, steps_of_ten, validate):
    model = compiled(4, remainder=remainder, **mode)
    y = (1, 2, 3, 4, 5, 6)
    data = (ones(6), column(*y)) if validate else None
    fit(model, *y, epochs=2, validation_data=data)
    assert weight(model) == pytest.approx(w, abs=1e-6)
    assert iterations(model) == model.optimizer_steps == steps
    assert accumkit.optimizer_steps(6, 4, 2, remainder) == steps

    model = compiled(4, remainder=remainder, **mode)
    fit(model, *range(10), epochs=3)
    assert iterations(model) == steps_of_ten
    assert accumkit.optimizer_steps(10, 4, 3, remainder) == steps_of_ten
    assert model.open_micro_batches == (2 if remainder == "carry" else 0)


def test_01_remainder_is_in_before_validation_and_callbacks(mode):
    model = compiled(4, **mode)
    log = WeightLog()
    y = (1, 2, 3, 4, 5, 6)
    history = fit(
        model,
        *y,
        epochs=1,
        validation_data=(ones(1), column(0)),
        callbacks=[log],
    )
    # 0.5 after four; then 0.2 * (5.5 - 0.5) more.
    assert log.batches[-1] == np.float32(0.5)
    assert log.epochs == [pytest.approx(1.5)]
    assert history.history["val_loss"] == [pytest.approx(1.5**2)]


def test_02_mean_not_sum(mode):
    model = compiled(4, **mode)
    fit(model, 1, 2, 3, 4)
    stock = one_weight(keras.Sequential)
    stock.compile(SGD(0.1), "mse")
    fit(stock, 1, 2, 3, 4, batch_size=4)
    assert weight(model) == pytest.approx(0.5, abs=1e-7)
    assert weight(model) == pytest.approx(weight(stock), abs=1e-7)
    assert iterations(model) == iterations(stock) == 1


def test_03_nothing_moves_inside_a_window(mode):
    model = compiled(4, keras.optimizers.Adam(0.1), negative_mean, **mode)
    log = WeightLog()
    fit(model, *[1] * 8, callbacks=[log])
    w = log.batches
    assert w[:3] == [0.0] * 3
    assert w[3] == pytest.approx(0.1, abs=1e-5)
    assert w[3:7] == [w[3]] * 4  # bitwise
    assert w[7] == pytest.approx(0.2, abs=1e-5)
    assert iterations(model) == 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05),
        lambda: keras.optimizers.Lion(0.1),
    ],
    ids=["momentum", "nadam", "adamw", "lion"],
)
def test_03_as_the_large_batch(optimizer):
    model = compiled(4, optimizer(), negative_mean)
    fit(model, *[1] * 8)
    stock = one_weight(keras.Sequential)
    stock.compile(optimizer(), negative_mean)
    fit(stock, *[1] * 8, batch_size=4)
    assert weight(stock) > 0.05
    assert weight(model) == pytest.approx(weight(stock), rel=1e-6)
    assert iterations(model) == iterations(stock) == 2


def test_04_schedules_count_optimizer_steps(mode):
    schedule = keras.optimizers.schedules.ExponentialDecay(
        0.1, decay_steps=1, decay_rate=0.5
    )
    model = compiled(2, SGD(schedule), negative_mean, **mode)
    fit(model, *[1] * 8)
    assert weight(model) == pytest.approx(0.1875, abs=1e-6)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.00625)


def test_05_clips_the_window(mode):
    model = Stack(
        [
            keras.Input((2,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(
        SGD(1.0, global_clipnorm=1.0),
        lambda y, p: 2 * keras.ops.mean(p),
        accumulation_steps=2,
        **mode,
    )
    x = np.eye(2, dtype="float32")
    model.fit(x, x[:, :1], batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), [-0.70711] * 2, atol=1e-5
    )


def test_06_decays_once(mode):
    model = compiled(4, SGD(0.1, weight_decay=0.1), **mode)
    model.set_weights([np.ones((1, 1), "float32")])
    model.fit(0 * ones(4), 0 * ones(4), batch_size=1, verbose=0)
    assert weight(model) == pytest.approx(0.99, abs=1e-6)
    assert iterations(model) == 1


@pytest.mark.parametrize(("weighting", "w"), [("exact", 0.4), ("uniform", 0.5)])
def test_07_ragged_last_micro_batch(mode, weighting, w):
    model = compiled(2, weighting=weighting, **mode)
    fit(model, 1, 1, 4, batch_size=2)
    assert weight(model) == pytest.approx(w, abs=1e-6)
    assert iterations(model) == 1


def test_11_settable_and_never_frozen(mode):
    model = compiled(4, **mode)
    y = [1, 2, 3, 4] * 3
    fit(model, *y)
    assert iterations(model) == 3
    w = 0.0
    for _ in range(3):
        w += 0.2 * (2.5 - w)
    assert weight(model) == pytest.approx(w, abs=1e-6)
    traced = model.train_function
    model.accumulation_steps = 2
    fit(model, *[1] * 8)
    assert model.train_function is traced
    assert iterations(model) == 7


def test_11_an_open_window_keeps_its_n(mode):
    model = compiled(4, **mode)
    model.train_on_batch(ones(1), column(1))
    model.accumulation_steps = 2
    model.train_on_batch(ones(1), column(1))
    model.train_on_batch(ones(1), column(1))
    assert (model.open_micro_batches, model.optimizer_steps) == (3, 0)
    model.train_on_batch(ones(1), column(1))
    assert (model.open_micro_batches, model.optimizer_steps) == (0, 1)
    assert weight(model) == pytest.approx(0.2)
    model.train_on_batch(ones(1), column(1))
    model.train_on_batch(ones(1), column(1))
    assert (model.open_micro_batches, model.optimizer_steps) == (0, 2)
    assert weight(model) == pytest.approx(0.36)


def test_11_n_can_leave_one(mode):
    model = compiled(1, **mode)
    fit(model, 1, 1)
    assert model._accumulation.window is None
    assert weight(model) == pytest.approx(0.36)
    model.accumulation_steps = 2
    fit(model, 1, 1)
    assert iterations(model) == 3
    assert weight(model) == pytest.approx(0.36 + 0.2 * 0.64)
    model.accumulation_steps = 1
    fit(model, 1, 1)
    assert iterations(model) == 5


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_13_reported_loss(policy, mode):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        losses = []
        for options in (
            {"accumulation_steps": 4},
            {"accumulation_steps": 1},
            {"micro_batch_size": 1},
        ):
            model = one_weight()
            model.compile(SGD(0.0), "mse", **options, **mode)
            size = 4 if "micro_batch_size" in options else 1
            history = fit(model, 1, 2, 3, 4, batch_size=size)
            losses.append(history.history["loss"][0])
            evaluated = model.evaluate(
                ones(4), column(1, 2, 3, 4), batch_size=1, verbose=0
            )
            assert evaluated == pytest.approx(7.5)
        assert losses == [pytest.approx(7.5)] * 3
    finally:
        keras.config.set_dtype_policy(before)


class Crash(keras.callbacks.Callback):
    """Raises, or stops, after a number of micro-batches of an epoch."""

    def __init__(self, epoch, batches, stop=False):
        super().__init__()
        self.at, self.stop, self.epoch = (epoch, batches - 1), stop, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            if not self.stop:
                raise RuntimeError("crash")
            self.model.stop_training = True


def test_14_resume_after_an_interruption(tmp_path, mode):
    def run(*callbacks):
        model = compiled(4, keras.optimizers.Adam(0.1), **mode)
        fit(model, *range(8), epochs=2, callbacks=list(callbacks))
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    whole = run()
    with pytest.raises(RuntimeError, match="crash"):
        run(backup(), Crash(1, 3))
    keras.utils.clear_session()
    resumed = run(backup())
    assert iterations(resumed) == iterations(whole) == 4
    assert abs(weight(whole)) > 0.1
    assert weight(resumed) == pytest.approx(weight(whole), rel=1e-6)


@pytest.mark.parametrize(
    ("remainder", "steps"), [("apply", 4), ("carry", 3), ("drop", 0)]
)
def test_15_epoch_shorter_than_n(mode, remainder, steps):
    model = compiled(4, remainder=remainder, **mode)
    if remainder == "drop":
        with pytest.warns(accumkit.AccumkitWarning, match="No window can be"):
            fit(model, 1, 2, 3, epochs=4)
        assert weight(model) == 0
    else:
        fit(model, 1, 2, 3, epochs=4)
        assert weight(model) > 0.5
    if remainder == "apply":
        assert weight(model) == pytest.approx(2 * (1 - 0.8**4), abs=1e-6)
    assert iterations(model) == steps
    assert accumkit.optimizer_steps(3, 4, 4, remainder) == steps


def test_15_carry_that_can_fill_only_over_two_fits():
    model = compiled(8, remainder="carry")
    with pytest.warns(accumkit.AccumkitWarning, match="No window can be"):
        fit(model, *[1] * 4)
    fit(model, *[1] * 4)
    assert iterations(model) == 1
    assert weight(model) == pytest.approx(0.2)


def test_17_nothing_is_left_over_between_fits(mode):
    model = compiled(4, **mode)
    fit(model, 1, 2, 3, 9, 9, callbacks=[Crash(0, 3, stop=True)])
    assert iterations(model) == 1
    assert weight(model) == pytest.approx(0.4, abs=1e-6)

    with pytest.raises(RuntimeError, match="crash"):
        fit(model, 7, 7, 7, 7, callbacks=[Crash(0, 3)])
    assert model.open_micro_batches == 3
    model.set_weights([np.zeros((1, 1), "float32")])
    fit(model, 1, 2, 3, 4)
    assert weight(model) == pytest.approx(0.5, abs=1e-6)
    assert iterations(model) == 2


def test_17_carry_goes_on_with_the_window(mode):
    model = compiled(4, remainder="carry", **mode)
    with pytest.raises(RuntimeError, match="crash"):
        fit(model, 1, 2, 3, 9, callbacks=[Crash(0, 3)])
    fit(model, 4)
    assert weight(model) == pytest.approx(0.5, abs=1e-6)
    assert iterations(model) == 1


@pytest.mark.parametrize("jit", [True])
def test_22_one_more_trace_for_the_ragged_batch(jit):
    traces = []

    class Counting(Stack):
        def train_step(self, *args):
            traces.append(1)
            return super().train_step(*args)

    model = one_weight(Counting)
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    fit(model, 1, 1, 4, batch_size=2, epochs=3)
    assert iterations(model) == 3
    if keras.config.backend() != "torch":
        assert 1 <= len(traces) <= 2


def test_26_n_of_one_is_stock_keras_to_the_bit(mode):
    def run(cls, **kwargs):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((4,))
        x = keras.layers.Dense(8, activation="relu")(inputs)
        x = keras.layers.Dropout(0.5)(x)
        model = cls(inputs, keras.layers.Dense(1)(x))
        model.compile("adam", "mse", metrics=["mae"], **kwargs, **mode)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(20, 4)).astype("float32")
        history = model.fit(
            x, x[:, :1], batch_size=6, epochs=2, verbose=0, shuffle=False
        )
        return model, history.history

    ours, history = run(Net, accumulation_steps=1)
    stock, expected = run(keras.Model)
    assert history == expected
    for a, b in zip(ours.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert ours._accumulation.window is None


@pytest.mark.parametrize(
    ("remainder", "w", "steps"),
    [("apply", 20.16, 2), ("drop", 0.2, 1), ("carry", 0.2, 1)],
)
def test_27_tiny_remainder(mode, remainder, w, steps):
    model = compiled(8, remainder=remainder, **mode)
    fit(model, *[1] * 8, 100)
    assert weight(model) == pytest.approx(w, abs=1e-5)
    assert iterations(model) == steps
