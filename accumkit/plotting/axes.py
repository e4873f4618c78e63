"""The axes of a new figure, wherever it is drawn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def new_axes() -> Axes:
    """Returns the axes of a new figure; in a notebook one that pyplot knows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plotting needs matplotlib. Install it with "
            '`pip install "accumkit[plot]"`.'
        ) from error
    if _in_notebook():
        from matplotlib import pyplot

        figure = pyplot.figure(layout="constrained")
    else:
        figure = Figure(layout="constrained")
    ax = figure.subplots()
    ax.grid(alpha=0.3)
    return ax


def _in_notebook() -> bool:
    # A notebook draws the figures that pyplot knows, and closes them after
    # the cell; a free-standing one it prints as text.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
