"""Histories to frames, frames to axes: asserted on artists, never images."""

import os
import pathlib
import subprocess
import sys
import types

import keras
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from accumkit import plotting

LOGS = {
    "accuracy": [0.5, 0.7, 0.8],
    "loss": [0.9, 0.5, 0.4],
    "val_accuracy": [0.4, 0.6, 0.7],
    "val_loss": [1.0, 0.6, 0.5],
}
COUNTERS = {
    "optimizer_steps": [3, 6, 8],
    "micro_batches": [12, 24, 34],
    "effective_batch_size": [32.0, 32.0, 30.0],
}


@pytest.fixture
def step_frame():
    return pd.DataFrame(
        {
            "optimizer_step": [1, 2, 3, 4],
            "epoch": [0, 0, 1, 1],
            "micro_batches": [4, 6, 10, 12],
            "samples": [32, 16, 32, 16],
            "learning_rate": [0.1] * 4,
            "loss": [4.0, 3.0, 2.0, 1.0],
            "gradient_norm": [1.0] * 4,
            "seconds": [0.1, 0.2, 0.3, 0.4],
        }
    )


@pytest.fixture
def ax():
    return Figure().subplots()


def fit(callbacks=(), **options):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((4, 1), "float32")
    return model.fit(
        x,
        x,
        validation_data=(x, x),
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )


def lines(ax):
    """Label -> (x values, y values, line style, color, marker)."""
    return {
        line.get_label(): (
            list(line.get_xdata()),
            list(line.get_ydata()),
            line.get_linestyle(),
            line.get_color(),
            line.get_marker(),
        )
        for line in ax.get_lines()
    }


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


# history_frame


def test_frame_of_history():
    history = fit(epochs=2)
    frame = plotting.history_frame(history)
    assert frame["epoch"].tolist() == [0, 1]
    assert set(frame) == {"epoch", "loss", "mae", "val_loss", "val_mae"}
    assert frame["loss"].tolist() == history.history["loss"]


def test_frame_of_dict_counts_epochs_from_zero():
    frame = plotting.history_frame(LOGS)
    assert list(frame) == ["epoch", *LOGS]
    assert frame["epoch"].tolist() == [0, 1, 2]


def test_frame_of_resumed_run_keeps_epoch_numbers():
    history = fit(initial_epoch=3, epochs=7, validation_freq=2)
    frame = plotting.history_frame(history, validation_freq=2)
    assert frame["epoch"].tolist() == [3, 4, 5, 6]
    assert frame["val_loss"].notna().tolist() == [True, False, True, False]
    assert frame["val_loss"].dropna().tolist() == history.history["val_loss"]


def test_frame_places_a_list_of_validation_epochs():
    history = fit(epochs=5, validation_freq=[1, 4])
    frame = plotting.history_frame(history, validation_freq=[1, 4])
    assert np.flatnonzero(frame["val_loss"].notna()).tolist() == [0, 3]


def test_frame_does_not_guess_validation_epochs():
    history = fit(epochs=4, validation_freq=3)
    with pytest.raises(ValueError, match="`validation_freq` must be given"):
        plotting.history_frame(history)
    with pytest.raises(ValueError, match="Received: validation_freq=2"):
        plotting.history_frame(history, validation_freq=2)


def test_frame_refuses_a_history_of_several_fits():
    history = keras.callbacks.History()
    fit([history], epochs=2)
    fit([history], epochs=2)
    with pytest.raises(ValueError, match="one value of each metric"):
        plotting.history_frame(history)


def test_frame_of_csv_logger(tmp_path):
    path = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(path, append=True)
    first = fit([logger], epochs=2, validation_freq=2)
    second = fit([logger], initial_epoch=2, epochs=4, validation_freq=2)
    frame = plotting.history_frame(str(path))
    assert frame["epoch"].tolist() == [0, 1, 2, 3]
    assert frame["val_loss"].isna().tolist() == [True, False, True, False]
    np.testing.assert_allclose(
        frame["loss"], first.history["loss"] + second.history["loss"]
    )


def test_frame_of_csv_logger_without_validation(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss,val_loss\n0,0.5,NA\n1,0.4,NA\n")
    assert list(plotting.history_frame(path)) == ["epoch", "loss"]


def test_frame_of_step_logger(step_frame, tmp_path):
    frame = plotting.history_frame(step_frame)
    pd.testing.assert_frame_equal(frame, step_frame)
    assert frame is not step_frame
    step_frame.to_csv(tmp_path / "steps.csv", index=False)
    frame = plotting.history_frame(tmp_path / "steps.csv")
    pd.testing.assert_frame_equal(frame, step_frame)


def test_frame_refuses_what_it_can_not_read(tmp_path):
    with pytest.raises(TypeError, match=r"`history` must be .* Received"):
        plotting.history_frame(3)
    with pytest.raises(ValueError, match="column 'epoch'"):
        plotting.history_frame(pd.DataFrame({"loss": [1.0]}))
    (tmp_path / "log.csv").write_text("epoch;loss\n0;0.5\n")
    with pytest.raises(ValueError, match=r"log\.csv .*epoch;loss"):
        plotting.history_frame(tmp_path / "log.csv")


# plot_history


def test_plot_history_draws_the_loss():
    ax = plotting.plot_history(LOGS)
    drawn = lines(ax)
    assert list(drawn) == legend(ax) == ["Loss", "Validation loss"]
    assert drawn["Loss"][:3] == ([0, 1, 2], LOGS["loss"], "-")
    assert drawn["Validation loss"][:3] == ([0, 1, 2], LOGS["val_loss"], "--")
    assert drawn["Loss"][3] == drawn["Validation loss"][3]
    assert ax.get_xlabel() == "Epoch"
    assert ax.get_ylabel() == "Loss"


def test_plot_history_draws_several_metrics():
    ax = plotting.plot_history(LOGS, ["loss", "accuracy"])
    drawn = lines(ax)
    assert legend(ax) == [
        "Loss",
        "Validation loss",
        "Accuracy",
        "Validation accuracy",
    ]
    assert drawn["Loss"][3] != drawn["Accuracy"][3]
    assert ax.get_ylabel() == "Value"
    assert legend(plotting.plot_history(LOGS, "val_loss")) == [
        "Validation loss"
    ]


def test_plot_history_returns_the_given_axes(ax):
    assert plotting.plot_history(LOGS, ax=ax) is ax
    assert len(ax.get_lines()) == 2


def test_validation_line_crosses_epochs_without_validation():
    logs = {"loss": [4.0, 3.0, 2.0, 1.0], "val_loss": [3.5, 1.5]}
    frame = plotting.history_frame(logs, validation_freq=2)
    drawn = lines(plotting.plot_history(frame))
    assert drawn["Validation loss"][:2] == ([1, 3], [3.5, 1.5])


def test_single_points_get_a_marker():
    logs = {"loss": [2.0, 1.0], "val_loss": [1.5]}
    frame = plotting.history_frame(logs, validation_freq=2)
    drawn = lines(plotting.plot_history(frame))
    assert drawn["Validation loss"][4] == "o"
    assert drawn["Loss"][4] in ("", "None")


@pytest.mark.parametrize(
    ("x", "label", "values"),
    [
        ("optimizer_steps", "Optimizer step", [3, 6, 8]),
        ("micro_batches", "Micro-batch", [12, 24, 34]),
        ("samples", "Samples seen", [96, 192, 252]),
    ],
)
def test_x_of_epochs(x, label, values):
    ax = plotting.plot_history({**LOGS, **COUNTERS}, x=x)
    assert ax.get_xlabel() == label
    assert lines(ax)["Loss"][0] == values


@pytest.mark.parametrize(
    ("x", "label", "values"),
    [
        ("epoch", "Epoch", [0.0, 0.5, 1.0, 1.5]),
        ("optimizer_steps", "Optimizer step", [1, 2, 3, 4]),
        ("micro_batches", "Micro-batch", [4, 6, 10, 12]),
        ("samples", "Samples seen", [32, 48, 80, 96]),
    ],
)
def test_x_of_optimizer_steps(step_frame, x, label, values):
    ax = plotting.plot_history(step_frame, x=x)
    assert ax.get_xlabel() == label
    assert lines(ax)["Loss"][:2] == (values, [4.0, 3.0, 2.0, 1.0])


def test_samples_column_of_epochs_is_cumulative_already():
    ax = plotting.plot_history({**LOGS, "samples": [10, 20, 30]}, x="samples")
    assert lines(ax)["Loss"][0] == [10, 20, 30]


def test_samples_of_epochs_without_optimizer_step():
    logs = {
        "loss": [3.0, 2.0, 1.0],
        "optimizer_steps": [0, 1, 1],
        "effective_batch_size": [np.nan, 8.0, np.nan],
    }
    ax = plotting.plot_history(logs, x="samples")
    assert lines(ax)["Loss"][0] == [0, 8, 8]


def test_samples_need_every_optimizer_step(step_frame):
    thinned = step_frame[step_frame["optimizer_step"] % 2 == 0]
    with pytest.raises(ValueError, match="a row for every optimizer step"):
        plotting.plot_history(thinned, x="samples")


def test_samples_need_steps_that_go_up():
    logs = {**LOGS, **COUNTERS, "optimizer_steps": [3, 6, 3]}
    with pytest.raises(ValueError, match=r"never fall.*3, 6, 3"):
        plotting.plot_history(logs, x="samples")


@pytest.mark.parametrize("x", ["optimizer_steps", "micro_batches", "samples"])
def test_missing_x_names_the_way_out(x):
    with pytest.raises(ValueError, match="EffectiveStepLogger") as error:
        plotting.plot_history(LOGS, x=x)
    assert f"Received: x='{x}'" in str(error.value)


def test_bad_arguments():
    with pytest.raises(ValueError, match="`x` must be one of"):
        plotting.plot_history(LOGS, x="steps")
    with pytest.raises(ValueError, match=r"`metrics` .* 'mae'"):
        plotting.plot_history(LOGS, ["mae"])
    with pytest.raises(ValueError, match=r"`metric` .* the run 'a'"):
        plotting.plot_runs({"a": LOGS}, "mae")
    with pytest.raises(ValueError, match="`runs` must hold at least one"):
        plotting.plot_runs({})
    with pytest.raises(TypeError, match="`runs` must be a dict"):
        plotting.plot_runs([LOGS])


def test_error_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"accumkit\[plot\]"):
        plotting.plot_history(LOGS)


# plot_runs


def test_plot_runs(ax, step_frame):
    runs = {"history": {**LOGS, **COUNTERS}, "log": step_frame}
    assert plotting.plot_runs(runs, x="optimizer_steps", ax=ax) is ax
    drawn = lines(ax)
    assert legend(ax) == ["history", "log"]
    assert drawn["history"][:3] == ([3, 6, 8], LOGS["loss"], "-")
    assert drawn["log"][0] == [1, 2, 3, 4]
    assert drawn["history"][3] != drawn["log"][3]
    assert ax.get_xlabel() == "Optimizer step"
    assert ax.get_ylabel() == "Loss"


def test_plot_runs_keeps_equal_curves_visible():
    ax = plotting.plot_runs({"a": LOGS, "b": LOGS, "c": LOGS})
    widths = [line.get_linewidth() for line in ax.get_lines()]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3


def test_plot_runs_draws_a_validation_metric():
    ax = plotting.plot_runs({"a": LOGS, "b": LOGS}, "val_accuracy")
    assert lines(ax)["b"][1:3] == (LOGS["val_accuracy"], "-")
    assert ax.get_ylabel() == "Validation accuracy"


def test_more_runs_than_colors_stay_apart():
    ax = plotting.plot_runs({str(i): LOGS for i in range(12)})
    looks = {(look[3], look[4]) for look in lines(ax).values()}
    assert len(looks) == 12


# figures


@pytest.mark.parametrize("whole", [False, True])
def test_save_figure_closes_pyplot_figures(tmp_path, whole):
    before = pyplot.get_fignums()
    figure = pyplot.figure()
    ax = plotting.plot_history(LOGS, ax=figure.subfigures().subplots())
    path = tmp_path / "loss.png"
    assert plotting.save_figure(figure if whole else ax, path) == path
    assert path.stat().st_size > 0
    assert pyplot.get_fignums() == before


def test_notebook_figures_are_pyplot_ones(monkeypatch, tmp_path):
    shell = types.SimpleNamespace(kernel=None)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    before = pyplot.get_fignums()
    ax = plotting.plot_history(LOGS)
    assert pyplot.fignum_exists(ax.figure.number)
    plotting.save_figure(ax, tmp_path / "loss.png")
    assert pyplot.get_fignums() == before


def run_python(code, tmp_path):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    }
    root = pathlib.Path(plotting.__file__).parents[2]
    environment["PYTHONPATH"] = str(root)
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        check=True,
        cwd=tmp_path,
        env=environment,
    )


def test_thirty_plots_without_a_display(tmp_path):
    # Keras itself imports pyplot where it is installed; what needs a display
    # is the backend, which pyplot chooses when the first figure is made.
    code = """
import accumkit, matplotlib
from accumkit import plotting
assert matplotlib.get_backend(auto_select=False) is None
for i in range(30):
    ax = plotting.plot_history({"loss": [2.0, 1.0]})
    plotting.save_figure(ax, f"{i}.png")
assert matplotlib.get_backend(auto_select=False) is None
from matplotlib import pyplot
assert not pyplot.get_fignums()
"""
    run_python(code, tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.png")]
    assert len(sizes) == 30
    assert min(sizes) > 0


def test_import_needs_nothing_else(tmp_path):
    # The package's own __init__ imports Keras, so an empty one stands in.
    root = str(pathlib.Path(plotting.__file__).parents[1])
    code = f"""
import sys, types
package = types.ModuleType("accumkit")
package.__path__ = [{root!r}]
sys.modules["accumkit"] = package
import accumkit.plotting
loaded = {{name.split(".")[0] for name in sys.modules}}
assert not loaded & {{"matplotlib", "pandas", "keras", "tensorflow"}}, loaded
ours = {{name for name in sys.modules if name.startswith("accumkit.")}}
assert all(name.startswith("accumkit.plotting") for name in ours), ours
"""
    run_python(code, tmp_path)


# Validation in some epochs only


def validated(frame, name="val_loss"):
    return frame["epoch"][frame[name].notna()].tolist()


def test_frame_places_validation_where_one_number_fits():
    history = fit(epochs=6, validation_freq=2)
    frame = plotting.history_frame(history)
    assert validated(frame) == validated(frame, "val_mae") == [1, 3, 5]
    assert frame["val_loss"].dropna().tolist() == history.history["val_loss"]
    resumed = fit(initial_epoch=3, epochs=7, validation_freq=2)
    assert validated(plotting.history_frame(resumed)) == [3, 5]
    # Every number that fits means the same epochs.
    logs = {"loss": [1.0, 2.0], "val_loss": [3.0]}
    assert validated(plotting.history_frame(logs)) == [1]


@pytest.mark.parametrize(
    ("epochs", "values", "fitting"),
    [(5, 1, "3, 4, 5"), (7, 4, "no whole number"), (4, 3, "no whole number")],
)
def test_frame_says_which_numbers_would_fit(epochs, values, fitting):
    logs = {"loss": [1.0] * epochs, "val_loss": [1.0] * values}
    with pytest.raises(ValueError, match=f"which {fitting} would fit"):
        plotting.history_frame(logs)


def test_drawing_asks_for_what_is_drawn_only():
    logs = {
        "loss": [0.9, 0.5, 0.4, 0.3],
        "val_loss": [0.6],  # the third or the fourth epoch
        "speed": [1.0, 2.0],  # of a callback that logs now and then
        "mae": [4.0, 3.0, 2.0, 1.0],
        "val_mae": [3.0, 1.0],
        "micro_batches": [2, 4, 6, 8],
        "optimizer_steps": [1, 2],
    }
    drawn = lines(plotting.plot_history(logs, ["loss", "mae"]))
    assert list(drawn) == ["Loss", "Mae", "Validation mae"]
    assert drawn["Loss"][:2] == ([0, 1, 2, 3], [0.9, 0.5, 0.4, 0.3])
    assert drawn["Validation mae"][:2] == ([1, 3], [3.0, 1.0])
    drawn = lines(plotting.plot_runs({"a": logs}, "loss", x="micro_batches"))
    assert drawn["a"][:2] == ([2, 4, 6, 8], [0.9, 0.5, 0.4, 0.3])
    drawn = lines(plotting.plot_runs({"a": logs}, "val_mae"))
    assert drawn["a"][:2] == ([1, 3], [3.0, 1.0])
    with pytest.raises(ValueError, match="`validation_freq` must be given"):
        plotting.plot_history(logs, "val_loss")
    with pytest.raises(ValueError, match="`validation_freq` must be given"):
        plotting.plot_runs({"a": logs}, "val_loss")
    with pytest.raises(ValueError, match="2 values of 'speed' for 4 epochs"):
        plotting.plot_history(logs, "speed")
    with pytest.raises(ValueError, match="2 values of 'optimizer_steps'"):
        plotting.plot_history(logs, "loss", x="optimizer_steps")
    del logs["val_loss"]
    with pytest.raises(ValueError, match="2 values of 'speed' for 4 epochs"):
        plotting.history_frame(logs)
