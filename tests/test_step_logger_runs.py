"""`EffectiveStepLogger` when runs break off, and among other callbacks."""

import csv
import tracemalloc

import keras
import numpy as np
import pytest
from models import Stack, column, fit, one_weight, ones, weight

from accumkit.callbacks import EffectiveStepLogger
from accumkit.callbacks.step_log import COLUMNS, MemoryLog


def compiled(rate=0.1, **options):
    model = one_weight()
    model.compile(keras.optimizers.SGD(rate), "mse", **options)
    return model


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_in(path):
    return [int(row["optimizer_step"]) for row in rows_of(path)]


class Break(keras.callbacks.Callback):
    """Raises before batch `at`, counted over the epochs."""

    def __init__(self, at, error):
        super().__init__()
        self.left, self.error = at, error

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise self.error


def broken_data(at, error):
    for _ in range(at):
        yield ones(1), column(1)
    raise error


@pytest.mark.parametrize("why", ["callback", "Ctrl-C", "data"])
def test_rows_before_an_exception_are_kept(tmp_path, mode, why):
    from test_step_logger import read_tensorboard

    model = compiled(accumulation_steps=2, **mode)
    path = tmp_path / "steps.csv"
    log = EffectiveStepLogger(path, tmp_path / "tb")
    error = KeyboardInterrupt("stop") if why == "Ctrl-C" else None
    error = error or RuntimeError("stop")
    # TensorFlow has its own class for what a generator raises.
    expected = (KeyboardInterrupt, Exception)
    with pytest.raises(expected, match="stop") as raised:  # noqa: PT012
        if why == "data":
            model.fit(
                broken_data(5, error),
                shuffle=False,
                verbose=0,
                callbacks=[log],
            )
        else:
            fit(model, *range(9), callbacks=[log, Break(5, error)])
    assert why == "data" or raised.value is error
    # Micro-batch 5 had opened a third window.
    assert list(log.frame["optimizer_step"]) == steps_in(path) == [1, 2]
    assert read_tensorboard(tmp_path / "tb", "optimizer_step/loss") == [1, 2]
    # The next `fit` forgets that one, and counts what it had seen.
    fit(model, *range(4), callbacks=[log])
    assert list(log.frame["optimizer_step"]) == steps_in(path) == [1, 2, 3, 4]
    assert list(log.frame["micro_batches"]) == [2, 4, 7, 9]
    assert weight(model) != 0


def test_later_epochs_and_the_remainder(tmp_path):
    model = compiled(accumulation_steps=2)
    path = tmp_path / "steps.csv"
    log = EffectiveStepLogger(path)
    with pytest.raises(RuntimeError, match="stop"):
        fit(
            model,
            *range(3),
            epochs=3,
            callbacks=[Break(5, RuntimeError("stop")), log],
        )
    assert steps_in(path) == [1, 2, 3]
    assert list(log.frame["epoch"]) == [0, 0, 1]
    assert list(log.frame["samples"]) == [2, 1, 2]


@pytest.mark.backend("jax")
@pytest.mark.parametrize("lost", [False, True])
def test_an_error_in_the_train_step_is_what_the_user_sees(tmp_path, lost):
    """With the state donated to the failing step, or not."""
    import jax

    def fail(x):
        if (x > 1).any():
            raise RuntimeError("in the step")
        return x

    class Failing(Stack):
        def call(self, x, training=None):
            if lost:
                x = jax.pure_callback(
                    fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x
                )
            elif x.shape[0] == 1:
                raise RuntimeError("in the step")
            return super().call(x, training=training)

    model = one_weight(Failing)
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=2)
    path = tmp_path / "steps.csv"
    log = EffectiveStepLogger(path)
    x = ones(11)
    x[-1] = 2
    with pytest.raises(Exception, match="in the step"):
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0, callbacks=[log])
    if not lost:
        assert steps_in(path) == [1, 2]
    assert len(log.frame) == len(steps_in(path))
    assert log._logs == []


def test_leaving_calls_all_and_hides_no_error():
    class Leaving(keras.callbacks.Callback):
        left = 0

        def on_fit_exit(self):
            Leaving.left += 1
            raise ValueError("on the way out")

    model = compiled(accumulation_steps=2)
    with pytest.raises(RuntimeError, match="stop"):
        fit(
            model,
            *range(9),
            callbacks=[Leaving(), Leaving(), Break(3, RuntimeError("stop"))],
        )
    assert Leaving.left == 2
    with pytest.raises(ValueError, match="on the way out"):
        fit(model, *range(4), callbacks=[Leaving(), Leaving()])
    assert Leaving.left == 4


@pytest.mark.parametrize("listed", ["list", "CallbackList", "nested"])
@pytest.mark.parametrize("validate", [False, True])
def test_its_place_among_callbacks_does_not_matter(tmp_path, listed, validate):
    path, seen = tmp_path / "epochs.csv", []
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.keras",
        monitor="effective_batch_size",
        mode="min",
        save_best_only=True,
    )
    model = compiled(accumulation_steps=2)
    callbacks = [
        keras.callbacks.CSVLogger(path),
        checkpoint,
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
        ),
        # Its rate is that of the epoch, not what this one makes of it.
        keras.callbacks.ReduceLROnPlateau(
            "optimizer_steps", patience=1, mode="min"
        ),
        EffectiveStepLogger(),
    ]
    if listed == "nested":
        callbacks = [keras.callbacks.CallbackList(callbacks, model=model)]
    if listed != "list":
        callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, model=model, epochs=3, steps=3
        )
    data = (ones(1), column(1)) if validate else None
    fit(
        model,
        *range(1, 4),
        epochs=3,
        validation_data=data,
        callbacks=callbacks,
    )
    expected = {
        "optimizer_steps": [2, 4, 6],
        "micro_batches": [3, 6, 9],
        "effective_batch_size": [1.5, 1.5, 1.5],
        "learning_rate": [0.1, 0.1, 0.01],
    }
    for name, values in expected.items():
        for found in (
            [float(row[name]) for row in rows_of(path)],
            [logs[name] for logs in seen],
            model.history.history[name],
        ):
            np.testing.assert_allclose(found, values, rtol=1e-6)
    assert (tmp_path / "1.keras").exists()
    assert checkpoint.best == 1.5


@pytest.mark.parametrize("first", [False, True])
def test_it_goes_on_where_a_backup_does(tmp_path, first):
    def resumed(*others, log):
        model = compiled(accumulation_steps=2)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        two = [log, backup] if first else [backup, log]
        callbacks = [*two, *others]
        fit(model, *range(4), epochs=3, callbacks=callbacks)

    path = tmp_path / "steps.csv"
    with pytest.raises(RuntimeError, match="stop"):
        resumed(Break(10, RuntimeError("stop")), log=EffectiveStepLogger(path))
    assert steps_in(path) == [1, 2, 3, 4, 5]
    log = EffectiveStepLogger(path)
    resumed(log=log)
    # Epoch 2 once more, from its beginning.
    assert list(log.frame["optimizer_step"]) == [5, 6]
    assert list(log.frame["micro_batches"]) == [10, 12]
    assert list(log.frame["epoch"]) == [2, 2]


def test_two_of_them(tmp_path):
    model = compiled(accumulation_steps=2)
    logs = [EffectiveStepLogger(), EffectiveStepLogger(gradient_norm=True)]
    history = fit(model, *range(5), epochs=2, callbacks=logs)
    for log in logs:
        assert list(log.frame["optimizer_step"]) == [1, 2, 3, 4, 5, 6]
        assert list(log.frame["micro_batches"]) == [2, 4, 5, 7, 9, 10]
    assert logs[0].frame["gradient_norm"].isna().all()
    assert (logs[1].frame["gradient_norm"] > 0).all()
    assert history.history["optimizer_steps"] == [3, 6]


def test_windows_between_two_fits_count():
    model = compiled(accumulation_steps=2)
    log = EffectiveStepLogger()
    fit(model, *range(4), callbacks=[log])
    for _ in range(2):
        model.train_on_batch(ones(1), column(1))
    fit(model, *range(4), callbacks=[log])
    assert list(log.frame["optimizer_step"]) == [1, 2, 4, 5]
    assert list(log.frame["micro_batches"]) == [2, 4, 8, 10]


def test_what_a_row_costs():
    log = MemoryLog()
    row = dict.fromkeys(COLUMNS, 7.0)
    tracemalloc.start()
    try:
        for _ in range(100):
            log.write([row] * 100)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 64 * 10_000 <= size < 80 * 10_000
    frame = log.frame()
    log.write([row])  # a frame is a copy
    assert (len(frame), len(log.frame())) == (10_000, 10_001)
    assert list(frame.columns) == list(COLUMNS)
