"""From tidy frames to matplotlib axes."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accumkit.plotting.axes import new_axes
from accumkit.plotting.frames import X_LABELS, frame_with, x_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is too faint on white.
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
# The second round of colors is told from the first by markers.
MARKERS = ("", "s", "^", "v")
THINNEST, THICKEST = 1.6, 5.6


def plot_history(
    history: Any,
    metrics: str | Sequence[str] | None = None,
    x: str = "epoch",
    ax: Axes | None = None,
) -> Axes:
    """Draws the learning curves of one run.

    Training is a solid line, validation a dashed one of the same color. A
    series of a single point gets a marker.

    Args:
        history: Whatever `history_frame` accepts.
        metrics: Name or names of the values to draw, each with its
            validation counterpart where the run has one whose epochs are
            known (see `history_frame`). Defaults to `None`: the loss.
        x: `"epoch"`, `"optimizer_steps"`, `"micro_batches"` or `"samples"`.
            All but the first need the values that
            `accumkit.callbacks.EffectiveStepLogger` logs. Defaults to
            `"epoch"`.
        ax: Axes to draw on. Defaults to `None`: those of a new figure. In a
            notebook it appears below the cell as any other figure does;
            elsewhere pyplot does not know it, so it needs no display and no
            closing, and `save_figure(ax, path)` or `ax.figure.savefig(path)`
            writes it.

    Returns:
        The Axes: `ax` itself where one was given.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `history` can't be read.
        ValueError: The run has no values for a metric or for `x`.

    Example:
    ```python
    history = model.fit(
        x, y, callbacks=[accumkit.callbacks.EffectiveStepLogger()]
    )
    ax = plot_history(history, ["loss", "accuracy"], x="optimizer_steps")
    save_figure(ax, "curves.png")
    ```
    """
    names = [metrics] if isinstance(metrics, str) else metrics or ["loss"]
    frame = frame_with(history, names, x)
    positions = x_values(frame, x)
    for name in names:
        _require_metric(frame, name, "`metrics`", "the run")
    ax = new_axes() if ax is None else ax
    for index, name in enumerate(names):
        for metric in (name, f"val_{name}"):
            if metric in frame.columns:
                style = "--" if metric.startswith("val_") else "-"
                label = _words(metric)
                _draw(ax, positions, frame[metric], index, label, style)
    _describe(ax, x, names[0] if len(names) == 1 else "value")
    return ax


def plot_runs(
    runs: Mapping[str, Any],
    metric: str = "loss",
    x: str = "epoch",
    ax: Axes | None = None,
) -> Axes:
    """Draws one metric of several runs side by side.

    Every run has its color and a solid line. Later runs are drawn thinner and
    on top of the earlier ones, so that equal curves show as one line inside
    another.

    Args:
        runs: Dict from the name of a run to whatever `history_frame` accepts.
        metric: Name of the value to draw, `"val_loss"` for example. Defaults
            to `"loss"`.
        x: As in `plot_history`. Defaults to `"epoch"`.
        ax: As in `plot_history`. Defaults to `None`.

    Returns:
        The Axes: `ax` itself where one was given.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `runs` is no dict, or one of the runs can't be read.
        ValueError: `runs` is empty, or a run has no values for `metric` or
            for `x`.

    Example:
    ```python
    runs = {"batch 64": large, "batch 8, accumulated 8 times": accumulated}
    ax = plot_runs(runs, "val_accuracy", x="samples")
    ```
    """
    if not isinstance(runs, Mapping):
        raise TypeError(
            "`runs` must be a dict from names to runs. Received: "
            f"{runs=} of type {type(runs).__name__}. Use `plot_history` for "
            "a single run."
        )
    if not runs:
        raise ValueError(
            f"`runs` must hold at least one run. Received: {runs=}"
        )
    series = {}
    for name, run in runs.items():
        frame = frame_with(run, [metric], x)
        _require_metric(frame, metric, "`metric`", f"the run {name!r}")
        series[name] = (x_values(frame, x), frame[metric])
    ax = new_axes() if ax is None else ax
    thinner = (THICKEST / THINNEST) ** (1 / max(len(series) - 1, 1))
    for index, (name, (positions, values)) in enumerate(series.items()):
        width = THINNEST * thinner ** (len(series) - 1 - index)
        _draw(ax, positions, values, index, name, "-", width)
    _describe(ax, x, metric)
    return ax


def save_figure(
    figure: Axes | Figure, path: str | os.PathLike[str], dpi: float = 150
) -> pathlib.Path:
    """Writes a figure to a file and closes it.

    Args:
        figure: matplotlib Figure, or any of its Axes.
        path: File to write; the ending chooses the format.
        dpi: Dots per inch. Defaults to 150.

    Returns:
        The path.

    Example:
    >>> save_figure(plot_history(history), "loss.png")  # doctest: +SKIP
    PosixPath('loss.png')
    """
    # The figure of an Axes may be a part of one; that part's is the whole.
    root = figure.figure.figure
    root.savefig(path, dpi=dpi)
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(root)
    return pathlib.Path(path)


def _draw(
    ax: Axes,
    positions: pd.Series,
    values: pd.Series,
    index: int,
    label: str,
    style: str,
    width: float = THINNEST,
) -> None:
    if str(values.name).startswith("val_"):
        # A gap there is an epoch without validation; the line goes across.
        positions, values = positions[values.notna()], values.dropna()
    rounds, color = divmod(index, len(COLORS))
    single = values.notna().sum() == 1
    ax.plot(
        positions.to_numpy(),
        values.to_numpy(),
        color=COLORS[color],
        linestyle=style,
        linewidth=width,
        marker="o" if single else MARKERS[rounds % len(MARKERS)],
        label=label,
    )


def _describe(ax: Axes, x: str, metric: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(X_LABELS[x])
    ax.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10])
    )
    ax.set_ylabel(_words(metric))
    ax.legend()


def _words(metric: str) -> str:
    words = metric.replace("val_", "validation_", 1).replace("_", " ")
    return words[:1].upper() + words[1:]


def _require_metric(
    frame: pd.DataFrame, metric: str, argument: str, run: str
) -> None:
    if metric not in frame.columns:
        raise ValueError(
            f"{argument} must name values that the run has. Received: "
            f"{metric!r}, while {run} has {list(frame.columns)}."
        )
