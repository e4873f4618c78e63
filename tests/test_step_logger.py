"""`EffectiveStepLogger` (case 23)."""

import csv
import warnings

import keras
import numpy as np
import pytest
from models import (
    Net,
    column,
    fit,
    iterations,
    mlp,
    one_weight,
    ones,
    regression_data,
    tagger,
    token_data,
    weight,
)

from accumkit.callbacks import EffectiveStepLogger

SPEEDUP = keras.optimizers.schedules.ExponentialDecay


def decayed():
    return SPEEDUP(0.1, decay_steps=1, decay_rate=0.9)


def compiled(schedule=None, **options):
    model = one_weight()
    rate = schedule or 0.1
    model.compile(keras.optimizers.SGD(rate), "mse", **options)
    return model


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_23_what_a_step_is(tmp_path, mode, steps_per_execution):
    if keras.config.backend() == "torch":
        steps_per_execution = 1
    schedule = decayed()
    model = compiled(
        schedule,
        accumulation_steps=4,
        steps_per_execution=steps_per_execution,
        **mode,
    )
    path = tmp_path / "steps.csv"
    log = EffectiveStepLogger(csv_path=path, tensorboard_dir=tmp_path / "tb")
    y = [1, 2, 3, 4] * 3
    history = fit(
        model,
        *y,
        epochs=3,
        callbacks=[log],
        validation_data=(ones(2), column(1, 2)),
    )
    frame = log.frame
    assert list(frame["optimizer_step"]) == list(range(1, 10))
    assert list(frame["micro_batches"]) == list(range(4, 37, 4))
    assert list(frame["epoch"]) == [0] * 3 + [1] * 3 + [2] * 3
    assert list(frame["samples"]) == [4] * 9
    rates = [float(schedule(k)) for k in range(9)]
    np.testing.assert_allclose(frame["learning_rate"], rates, rtol=1e-6)
    # The loss of a window, worked out by hand: w is constant within it.
    w, losses = 0.0, []
    for rate in rates:
        losses.append(np.mean([(w - v) ** 2 for v in (1, 2, 3, 4)]))
        w += 2 * rate * (2.5 - w)
    np.testing.assert_allclose(frame["loss"], losses, rtol=1e-5)
    assert weight(model) == pytest.approx(w, abs=1e-5)
    assert frame["seconds"].is_monotonic_increasing
    assert history.history["optimizer_steps"] == [3, 6, 9]
    assert history.history["micro_batches"] == [12, 24, 36]
    assert history.history["effective_batch_size"] == [4] * 3
    np.testing.assert_allclose(
        history.history["learning_rate"],
        [float(schedule(k)) for k in (3, 6, 9)],
        rtol=1e-6,
    )
    # A second fit goes on, without another trace.
    traced = model.train_function
    fit(model, *y, epochs=1, callbacks=[log])
    assert model.train_function is traced
    assert list(log.frame["optimizer_step"]) == list(range(1, 13))
    assert log.frame["micro_batches"].iloc[-1] == 48
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["optimizer_step"]) for r in rows] == list(range(1, 13))
    assert {r["gradient_norm"] for r in rows} == {""}
    assert read_tensorboard(tmp_path / "tb", "optimizer_step/loss") == (
        list(range(1, 13))
    )


def read_tensorboard(folder, tag):
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(
        str(folder), size_guidance={"tensors": 0}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events.Reload()
        return [event.step for event in events.Tensors(tag)]


def test_keras_tensorboard_beside_it(tmp_path):
    # Keras's callback writes through TensorFlow on every backend.
    pytest.importorskip("tensorflow", reason="Keras's callback needs it")
    model = compiled(accumulation_steps=4)
    log = EffectiveStepLogger()
    board = keras.callbacks.TensorBoard(tmp_path)
    fit(model, *range(12), epochs=2, callbacks=[log, board])
    assert list(log.frame["optimizer_step"]) == list(range(1, 7))


@pytest.mark.parametrize(
    ("remainder", "samples", "counts", "steps"),
    [
        ("apply", [4, 2, 4, 2], [4, 6, 10, 12], [2, 4]),
        ("carry", [4, 4, 4], [4, 8, 12], [1, 3]),
        ("drop", [4, 4], [4, 10], [1, 2]),
    ],
)
@pytest.mark.parametrize("validate", [False, True])
def test_remainders(mode, remainder, samples, counts, steps, validate):
    model = compiled(accumulation_steps=4, remainder=remainder, **mode)
    log = EffectiveStepLogger()
    history = fit(
        model,
        *range(1, 7),
        epochs=2,
        callbacks=[log],
        validation_data=(ones(1), column(1)) if validate else None,
    )
    assert list(log.frame["samples"]) == samples
    assert list(log.frame["micro_batches"]) == counts
    assert history.history["optimizer_steps"] == steps
    assert history.history["micro_batches"] == [6, 12]
    assert iterations(model) == steps[-1]


def test_pieces_of_a_batch(mode):
    data = regression_data(37)
    model, stock = mlp(Net), mlp(keras.Model)
    log = EffectiveStepLogger(gradient_norm=True)
    losses = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])
            for metric in self.model.metrics:
                metric.reset_state()

    model.compile(keras.optimizers.SGD(0.1), "mse", micro_batch_size=5, **mode)
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    x, y, w = data
    args = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, sample_weight=w, callbacks=[log], **args)
    stock.fit(x, y, sample_weight=w, callbacks=[Losses()], **args)
    assert list(log.frame["samples"]) == [16, 16, 5]
    assert list(log.frame["micro_batches"]) == [4, 8, 9]
    np.testing.assert_allclose(log.frame["loss"], losses, rtol=1e-5)
    assert (log.frame["gradient_norm"] > 0.01).all()


def test_exact_loss_and_norm_of_a_masked_window(mode):
    """Mean over the window's tokens; norm of what the optimizer was given."""
    x, y = token_data(16)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = tagger(Net)
    start = model.get_weights()
    model.compile(keras.optimizers.SGD(1.0), loss, accumulation_steps=4, **mode)
    log = EffectiveStepLogger(gradient_norm=True)
    expected = tagger(keras.Model)
    expected.compile("sgd", loss)
    value = expected.evaluate(x, y, batch_size=16, verbose=0)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[log])
    (row,) = log.frame.to_dict("records")
    assert row["loss"] == pytest.approx(value, rel=1e-5)
    step = [a - b for a, b in zip(start, model.get_weights(), strict=True)]
    norm = np.sqrt(sum((s**2).sum() for s in step))
    assert row["gradient_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 1}])
def test_n_of_one_is_still_stock_keras(options):
    def run(cls, callbacks, **options):
        model = mlp(cls)
        model.compile(keras.optimizers.Adam(0.1), "mse", **options)
        x, y, w = regression_data(37)
        model.fit(
            x,
            y,
            sample_weight=w,
            batch_size=8,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return model.get_weights()

    log = EffectiveStepLogger()
    for a, b in zip(
        run(Net, [log], **options), run(keras.Model, []), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert list(log.frame["samples"]) == [8, 8, 8, 8, 5]
    assert list(log.frame["optimizer_step"]) == [1, 2, 3, 4, 5]


def test_skipped_windows_have_no_row(mode):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(accumulation_steps=2, **mode)
    finally:
        keras.config.set_dtype_policy("float32")
    log = EffectiveStepLogger(gradient_norm=True)
    fit(model, 0.1, 0.3, 0.1, np.inf, 0.1, 0.3, callbacks=[log])
    frame = log.frame
    assert list(frame["optimizer_step"]) == [1, 2]
    assert list(frame["micro_batches"]) == [2, 6]
    assert frame["loss"][0] == pytest.approx(0.05, rel=1e-3)
    # Without the loss scale: 2 * 0.2 from zero.
    assert frame["gradient_norm"][0] == pytest.approx(0.4, rel=1e-3)


def test_every_and_printing(capsys):
    model = compiled(accumulation_steps=2)
    log = EffectiveStepLogger(every=3, verbose=1)
    history = fit(model, *range(20), callbacks=[log])
    assert list(log.frame["optimizer_step"]) == [3, 6, 9]
    assert list(log.frame["micro_batches"]) == [6, 12, 18]
    assert history.history["optimizer_steps"] == [10]
    assert "optimizer step 3: loss" in capsys.readouterr().out


def test_a_killed_run_keeps_its_rows_and_going_on_appends(tmp_path):
    path = tmp_path / "deep" / "steps.csv"

    class Crash(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("crash")

    model = compiled(accumulation_steps=2)
    with pytest.raises(RuntimeError, match="crash"):
        fit(
            model,
            *range(4),
            epochs=3,
            callbacks=[EffectiveStepLogger(path), Crash()],
        )
    with path.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    fit(model, *range(4), callbacks=[EffectiveStepLogger(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["optimizer_step"]) for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(r["micro_batches"]) for r in rows] == [2, 4, 6, 8, 10, 12]


def test_among_other_callbacks(tmp_path):
    """What later callbacks see has the counts, and nothing is disturbed."""
    model = compiled(accumulation_steps=2)
    path = tmp_path / "epochs.csv"
    log = EffectiveStepLogger()
    fit(
        model,
        *range(5),
        epochs=3,
        validation_data=(ones(1), column(1)),
        callbacks=[
            log,
            keras.callbacks.CSVLogger(path),
            keras.callbacks.EarlyStopping("val_loss", patience=5),
            keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        ],
    )
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["optimizer_steps"]) for r in rows] == [3, 6, 9]
    assert len(log.frame) == 9
    saved = keras.models.load_model(tmp_path / "3.keras")
    assert weight(saved) == weight(model)


def test_errors(tmp_path):
    with pytest.raises(TypeError, match="`every`"):
        EffectiveStepLogger(every=1.5)
    stock = one_weight(keras.Sequential)
    stock.compile("sgd", "mse")
    with pytest.raises(TypeError, match="AccumulationMixin"):
        fit(stock, 1, 2, callbacks=[EffectiveStepLogger()])


@pytest.mark.backend("tensorflow")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("batch", "options"),
    [(8, {"accumulation_steps": 2}), (16, {"micro_batch_size": 3})],
)
def test_under_a_strategy(batch, options):
    from test_mirrored_strategy import mirrored

    x, y, _ = regression_data(40)
    frames = []
    for scope in (None, mirrored()):
        log = EffectiveStepLogger(gradient_norm=True)
        if scope is None:
            model = mlp(Net)
            model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        else:
            with scope.scope():
                model = mlp(Net)
                model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        model.fit(
            x,
            y,
            batch_size=batch,
            shuffle=False,
            verbose=0,
            epochs=2,
            callbacks=[log],
        )
        frames.append(log.frame.drop(columns=["seconds"]))
    if "micro_batch_size" in options:
        # A replica cuts its own share: 8 samples make 3 pieces, not 6.
        for frame in frames:
            frame["micro_batches"] = 0
    assert len(frames[0]) == 6
    np.testing.assert_allclose(frames[0], frames[1], rtol=1e-4)
