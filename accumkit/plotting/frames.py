"""From what a run recorded to a tidy frame, and from a frame to x values."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accumkit.plotting.placing import rows_of

# To a type checker a column of a DataFrame may be a DataFrame; frames whose
# columns are computed with are therefore annotated as Any.
if TYPE_CHECKING:
    import pandas as pd

# The column that only a step logger's frame has: one row per optimizer step.
STEP_COLUMN = "optimizer_step"

# What the axes are made of, where a row is an epoch.
X_COLUMNS = {
    "optimizer_steps": ("optimizer_steps",),
    "micro_batches": ("micro_batches",),
    "samples": ("samples", "optimizer_steps", "effective_batch_size"),
}

X_LABELS = {
    "epoch": "Epoch",
    "optimizer_steps": "Optimizer step",
    "micro_batches": "Micro-batch",
    "samples": "Samples seen",
}


def history_frame(
    history: Any, validation_freq: int | Sequence[int] | None = None
) -> pd.DataFrame:
    """Turns the record of a run into a tidy DataFrame.

    A History, its dict and a `CSVLogger` file give one row per epoch; the
    frame and the file of `accumkit.callbacks.EffectiveStepLogger` one row per
    optimizer step.

    Keras appends to a validation metric only in the epochs that validated and
    does not record which ones those were. Where such a list is shorter than
    the run, `validation_freq` places its values. Without it they are placed
    where exactly one whole number fits: three values in six epochs are those
    of every second epoch.

    Args:
        history: `keras.callbacks.History` (its `epoch` numbers the rows, so
            that a resumed run keeps its epochs), its `history` dict (epochs
            numbered from 0), a DataFrame with a column `epoch` (returned as a
            copy), or the path of a CSV file with that column.
        validation_freq: What `fit` was given under this name: an int, or the
            epochs, counted from 1, that validated; a list must be given. Used
            for a History or its dict. Defaults to `None`: every so many
            epochs validated, or none.

    Returns:
        DataFrame with the column `epoch`, counted from 0 as Keras does, and a
        column for every logged value. Validation columns are NaN in the
        epochs without validation.

    Raises:
        TypeError: `history` is none of the above.
        ValueError: The values can't be assigned to epochs, or a frame or file
            has no column `epoch`.

    Example:
    >>> from accumkit.plotting import history_frame
    >>> logs = {"loss": [0.9, 0.5, 0.4, 0.3], "val_loss": [0.6, 0.5]}
    >>> history_frame(logs, validation_freq=2)
       epoch  loss  val_loss
    0      0   0.9       NaN
    1      1   0.5       0.6
    2      2   0.4       NaN
    3      3   0.3       0.5
    """
    return _frame(history, validation_freq, None)


def frame_with(history: Any, names: Collection[str], x: str) -> Any:
    """Returns the frame of a run in which some values are looked for.

    Args:
        history: As in `history_frame`.
        names: The values. Others that can't be assigned to epochs are left
            out.
        x: The axis that they are drawn against.

    Returns:
        DataFrame, as that of `history_frame`.

    Raises:
        ValueError: As `history_frame`, for `names` and what `x` needs.
    """
    return _frame(history, None, {*names, *X_COLUMNS.get(x, ())})


def _frame(
    history: Any,
    validation_freq: int | Sequence[int] | None,
    needed: Collection[str] | None,
) -> pd.DataFrame:
    import pandas as pd

    if isinstance(history, (str, os.PathLike)):
        return _checked_frame(pd.read_csv(history), f"the file {history}")
    if isinstance(history, pd.DataFrame):
        return _checked_frame(history.copy(), "the DataFrame")
    if isinstance(history, Mapping):
        lengths = [len(values) for values in history.values()]
        epochs = list(range(max(lengths, default=0)))
        return _frame_from_logs(history, epochs, validation_freq, needed)
    logs = getattr(history, "history", None)
    if isinstance(logs, Mapping):
        # `epoch` does not exist before the first `fit`.
        epochs = list(getattr(history, "epoch", []))
        return _frame_from_logs(logs, epochs, validation_freq, needed)
    raise TypeError(
        "`history` must be a `keras.callbacks.History`, its `history` dict, "
        "a pandas DataFrame or the path of a CSV file. "
        f"Received: history={history!r} of type {type(history).__name__}. "
        "Pass what `fit` returned, or the `frame` of an "
        "`accumkit.callbacks.EffectiveStepLogger`."
    )


def _checked_frame(frame: Any, source: str) -> pd.DataFrame:
    if "epoch" not in frame.columns:
        raise ValueError(
            "`history` must have a column 'epoch', counted from 0. Received: "
            f"{source} with the columns {list(frame.columns)}. Pass the "
            "History object itself, add the column, or read a file with "
            "another separator with `pandas.read_csv(path, sep=...)` first."
        )
    # `CSVLogger` heads a `val_` column for every value of the first epoch if
    # that one had no validation, whether the value ever gets one or not.
    unused = [
        name
        for name in frame.columns
        if str(name).startswith("val_") and frame[name].isna().all()
    ]
    return frame.drop(columns=unused)


def _frame_from_logs(
    logs: Mapping[str, Any],
    epochs: list[int],
    validation_freq: int | Sequence[int] | None,
    needed: Collection[str] | None,
) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {"epoch": epochs}
    for name, values in logs.items():
        try:
            rows = rows_of(name, len(values), epochs, validation_freq)
        except ValueError:
            if needed is None or name in needed:
                raise
            continue
        columns[name] = pd.Series(values, index=rows).reindex(epochs).array
    return pd.DataFrame(columns)


def x_values(frame: Any, x: str) -> pd.Series:
    """Where the rows of a frame stand on the x axis.

    Args:
        frame: What `history_frame` returned.
        x: `"epoch"`, `"optimizer_steps"`, `"micro_batches"` or `"samples"`;
            the last three are cumulative.

    Returns:
        Series with one value per row. The optimizer steps of a step logger's
        frame are spread evenly over their epoch. Samples are counted where
        optimizer steps are, so those before the first row of a resumed run
        enter with that row's effective batch.

    Raises:
        ValueError: `x` is unknown, or the frame lacks the values for it.
    """
    if x not in X_LABELS:
        raise ValueError(f"`x` must be one of {list(X_LABELS)}. Received: {x=}")
    by_step = STEP_COLUMN in frame.columns
    if x == "samples":
        return _samples_of_steps(frame) if by_step else _samples(frame)
    if x == "epoch" and by_step:
        rows = frame.groupby("epoch")[STEP_COLUMN]
        return frame["epoch"] + rows.cumcount() / rows.transform("size")
    column = STEP_COLUMN if by_step and x == "optimizer_steps" else x
    _require(frame, x, [column])
    return frame[column]


def _samples(frame: Any) -> pd.Series:
    if "samples" in frame.columns:
        return frame["samples"]
    _require(frame, "samples", ["optimizer_steps", "effective_batch_size"])
    total = frame["optimizer_steps"]
    steps = total.diff().fillna(total)
    if (steps < 0).any():
        raise ValueError(
            "`x='samples'` needs `optimizer_steps` that never fall. Received: "
            f"optimizer_steps={total.tolist()}. Draw the runs that the frame "
            "joins one by one, with `plot_runs`."
        )
    # The mean of an epoch that made no optimizer step is no number.
    sizes = frame["effective_batch_size"].where(steps > 0, 0)
    return (steps * sizes).cumsum()


def _samples_of_steps(frame: Any) -> pd.Series:
    _require(frame, "samples", ["samples"])
    if (frame[STEP_COLUMN].diff().dropna() != 1).any():
        raise ValueError(
            "`x='samples'` needs a row for every optimizer step, to sum the "
            "samples of the windows. Received: a frame in which "
            f"{STEP_COLUMN!r} does not go up by 1 from row to row. Log with "
            "`EffectiveStepLogger(every=1)`, or draw with "
            "`x='optimizer_steps'`."
        )
    return frame["samples"].cumsum()


def _require(frame: pd.DataFrame, x: str, columns: list[str]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise ValueError(
            f"`x` must be an axis that the run has values for; {x!r} needs "
            f"the columns {columns}. Received: x={x!r} and a run with the "
            f"columns {list(frame.columns)}. Train with `callbacks="
            "[accumkit.callbacks.EffectiveStepLogger()]`, which logs them, or "
            "draw with `x='epoch'`."
        )
