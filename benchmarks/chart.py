"""A run as a picture: speed and memory of every system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import headline, rounds, title
from benchmarks.results import Run, WorkloadResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _KERAS, _PLAIN = "#2f6db5", "#d98c3f", "#9aa5b1"
_COLORS = {
    "micro": _PLAIN,
    "large": _PLAIN,
    "keras": _KERAS,
    "keras-spe": _KERAS,
}
_LEGEND = (
    (_PLAIN, "stock Keras, nothing accumulated"),
    (_KERAS, "Keras's gradient_accumulation_steps"),
    (_OURS, "accumkit"),
)


def draw(run: Run, path: Path) -> None:
    """Store a bar chart, a row of panels for each measured workload."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # Without one of the references there is nothing to compare with.
    results = [result for result in run.workloads if result.references]
    if not results:
        return
    counts = [len(_measured(result)) for result in results]
    # A bar has the same thickness in every panel: 0.3 inches to each.
    heights = [0.3 * count + 1.0 for count in counts]
    figure = Figure(figsize=(11, sum(heights) + 1.1), layout="constrained")
    panels = figure.subplots(
        len(results),
        2,
        squeeze=False,
        gridspec_kw={"height_ratios": heights, "width_ratios": [3, 2]},
    )
    for result, (left, right) in zip(results, panels, strict=True):
        _speed(left, result)
        _memory(right, result)
    figure.suptitle(f"{title(run)}, {rounds(run)}, {run.machine['processor']}")
    figure.legend(
        handles=[Patch(color=color, label=label) for color, label in _LEGEND],
        loc="outside lower center",
        ncols=len(_LEGEND),
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _speed(axes: Axes, result: WorkloadResult) -> None:
    """Bars from 1 outwards on a logarithmic axis, as suits ratios.

    A large batch 40 times as fast else leaves no room to tell the others
    apart.
    """
    reference = result.references[0]
    names = _measured(result)
    values = [result.speed(name, reference) for name in names]
    _bars(axes, names, [value.median for value in values], start=1.0)
    rows = range(len(names))
    low, high = [v.low for v in values], [v.high for v in values]
    axes.hlines(rows, low, high, color="#222222", linewidth=1.3)
    for row, value in zip(rows, values, strict=True):
        slower = value.median < 1
        axes.annotate(
            f"{value.median:.2f}x",
            (min(value.low, 1) if slower else max(value.high, 1), row),
            xytext=(-4 if slower else 4, 0),
            textcoords="offset points",
            ha="right" if slower else "left",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color="#444444", linewidth=0.8)
    # Room for the labels at both ends, in proportion to the axis.
    left, right = min(0.8, *low), max(1.25, *high)
    room = (right / left) ** 0.12
    axes.set_xscale("log", base=2)
    ticks = [2.0**power for power in range(-5, 9)]
    if right / left < 10:
        ticks += [1.5 * tick for tick in ticks]
    axes.set_xticks([tick for tick in ticks if left <= tick <= right * room])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlim(left / room, right * room)
    axes.set_xlabel(f"times as fast as {reference}", fontsize=9)
    axes.set_title(headline(result), loc="left", fontsize=10, weight="bold")


def _memory(axes: Axes, result: WorkloadResult) -> None:
    names = _measured(result)
    peaks = [result.systems[name].peak / 1e6 for name in names]
    _bars(axes, names, peaks)
    for row, peak in enumerate(peaks):
        axes.annotate(
            f"{peak:.0f}",
            (peak, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.15 * max(*peaks, 1))
    axes.set_xlabel("peak MB above the imports'", fontsize=9)


def _bars(
    axes: Axes, names: list[str], values: list[float], start: float = 0.0
) -> None:
    widths = [value - start for value in values]
    colors = [_COLORS.get(name, _OURS) for name in names]
    axes.barh(range(len(names)), widths, left=start, color=colors, height=0.72)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _measured(result: WorkloadResult) -> list[str]:
    return [name for name in result.systems if result.measured(name)]
