"""What the proof says and writes."""

from __future__ import annotations

import pathlib

import pandas as pd

from accumkit import plotting
from accumkit.proof.runs import Proof, Run


def progress(run: Run) -> str:
    """Returns the line that tells of a run's last epoch.

    Args:
        run: The run.

    Returns:
        One line.
    """
    row = run.rows[-1]
    return (
        f"{run.name:<22}  epoch {row['epoch'] + 1:>3}"
        f"  {row['optimizer_steps']:>7} optimizer steps"
        f"  loss {row['loss']:.4f}  val_accuracy {row['val_accuracy']:.4f}"
        f"  {row['seconds']:6.1f} s"
    )


def table(proof: Proof) -> str:
    """Returns the results of the runs.

    Args:
        proof: The runs.

    Returns:
        Lines of a table with a head.
    """
    lines = [
        f"{'run':<12}{'batch':>7}{'N':>6}{'optimizer steps':>17}"
        f"{'final loss':>12}{'best val. accuracy':>20}{'seconds':>9}"
    ]
    for run in proof.shown:
        last = run.rows[-1]
        best = max(row["val_accuracy"] for row in run.rows)
        lines.append(
            f"{run.name:<12}{run.batch_size:>7}{run.accumulation_steps:>6}"
            f"{last['optimizer_steps']:>17}{last['loss']:>12.4f}"
            f"{best:>20.4f}{last['seconds']:>9.1f}"
        )
    return "\n".join(lines)


def distances(proof: Proof) -> str:
    """Returns how far the weights of the runs are from the large batch's.

    Args:
        proof: The runs.

    Returns:
        Lines of a table with a head.
    """
    epochs = sorted({1, min(2, len(proof.large.rows)), len(proof.large.rows)})
    lines = [
        f"{'|w - w_large| / |w_large - w_start|':<46}"
        + "".join(f"{f'epoch {epoch}':>10}" for epoch in epochs)
    ]
    for label, run in (
        ("accumulated", proof.accumulated),
        ("large batch in another order (rounding alone)", proof.reordered),
        ("micro-batch", proof.micro),
    ):
        values = proof.distances(run)
        lines.append(
            f"{label:<46}"
            + "".join(f"{values[epoch - 1]:>10.1e}" for epoch in epochs)
        )
    return "\n".join(lines)


def frame(proof: Proof) -> pd.DataFrame:
    """Returns the runs as a tidy frame.

    Args:
        proof: The runs.

    Returns:
        DataFrame with one row per run and epoch.
    """
    return pd.DataFrame(
        {
            "run": run.name,
            "batch_size": run.batch_size,
            "accumulation_steps": run.accumulation_steps,
            **row,
            "distance": distance,
        }
        for run in proof.shown
        for row, distance in zip(run.rows, proof.distances(run), strict=True)
    )


def write(proof: Proof, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes `runs.csv` and `curves.png`.

    Args:
        proof: The runs.
        folder: Where to write them; it exists.

    Returns:
        The paths.
    """
    rows = frame(proof)
    rows.to_csv(folder / "runs.csv", index=False)
    return [folder / "runs.csv", _curves(proof, rows, folder / "curves.png")]


def _curves(
    proof: Proof, rows: pd.DataFrame, path: pathlib.Path
) -> pathlib.Path:
    from matplotlib.figure import Figure

    micro, accumulated, large = proof.shown
    labels = {
        large.name: f"batch {large.batch_size}",
        accumulated.name: f"batch {accumulated.batch_size}, accumulated "
        f"{accumulated.accumulation_steps} times",
        micro.name: f"batch {micro.batch_size}",
    }
    runs = {label: rows[rows["run"] == name] for name, label in labels.items()}
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for line, metric in zip(panels, ("loss", "val_accuracy"), strict=True):
        for ax, x in zip(line, ("optimizer_steps", "samples"), strict=True):
            plotting.plot_runs(runs, metric, x=x, ax=ax)
            ax.get_legend().remove()
            ax.grid(alpha=0.3)
    # The large batch takes N times fewer optimizer steps.
    panels[0, 0].set_xscale("log")
    panels[0, 0].set_yscale("log")
    for ax in panels[0]:
        ax.set_xlabel("")
    for ax in panels[:, 1]:
        ax.set_ylabel("")
    handles = panels[0, 0].get_lines()
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return plotting.save_figure(figure, path)
