"""Learning curves: a training history in, a tidy frame or matplotlib axes out.

Three steps, each usable alone: `history_frame` turns what a run recorded into
a pandas DataFrame, `plot_history` and `plot_runs` draw frames onto axes, and
`save_figure` writes a figure to a file and closes it. Nothing is shown.
matplotlib is imported by the drawing functions only.
"""

from accumkit.plotting.curves import plot_history as plot_history
from accumkit.plotting.curves import plot_runs as plot_runs
from accumkit.plotting.curves import save_figure as save_figure
from accumkit.plotting.frames import history_frame as history_frame

__all__ = ["history_frame", "plot_history", "plot_runs", "save_figure"]
