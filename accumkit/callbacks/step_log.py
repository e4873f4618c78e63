"""Where the rows of a step log go: memory, CSV, TensorBoard."""

import csv
import math
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas

COLUMNS: tuple[str, ...] = (
    "optimizer_step",
    "epoch",
    "micro_batches",
    "samples",
    "learning_rate",
    "loss",
    "gradient_norm",
    "seconds",
)

# Of whole numbers; the others are floats.
_COUNTS = ("optimizer_step", "epoch", "micro_batches", "samples")


class MemoryLog:
    """Rows in memory, eight bytes for each value: 64 bytes a row."""

    def __init__(self) -> None:
        # Row after row in one array: it grows by whole rows or not at all,
        # whenever Ctrl-C comes. Doubles hold whole numbers up to 2**53.
        self._values = array("d")

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows."""
        self._values.extend(
            array("d", [row[name] for row in rows for name in COLUMNS])
        )

    def frame(self) -> "pandas.DataFrame":
        """Returns a copy of the rows as a DataFrame."""
        import pandas as pd

        table = np.array(self._values).reshape(-1, len(COLUMNS))
        frame = pd.DataFrame(table, columns=list(COLUMNS))
        return frame.astype(dict.fromkeys(_COUNTS, "int64"))


class CsvLog:
    """A CSV file of rows; what was written survives a killed process.

    Args:
        path: The file. If it exists, rows are appended.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists() or self.path.stat().st_size == 0
        self._file = self.path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        if new:
            self._writer.writeheader()
            self._file.flush()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows and hands them to the operating system."""
        for row in rows:
            self._writer.writerow(
                {k: "" if _is_missing(v) else v for k, v in row.items()}
            )
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @staticmethod
    def micro_batches_at(
        path: str | os.PathLike[str], optimizer_step: int
    ) -> int:
        """The last count of micro-batches at or before an optimizer step."""
        count = 0
        if not Path(path).exists():  # another process's, on another machine
            return count
        with Path(path).open(newline="") as file:
            for row in csv.DictReader(file):
                if int(row["optimizer_step"]) <= optimizer_step:
                    count = int(row["micro_batches"])
        return count


class TensorBoardLog:
    """Scalars on the axis of optimizer steps.

    TensorBoard's own writer: it needs NumPy only, and no framework.

    Args:
        directory: Where the event file goes.

    Raises:
        ImportError: If the package `tensorboard` is missing.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            from tensorboard.summary import DirectoryOutput, Writer
        except ImportError as error:
            raise ImportError(
                "`tensorboard_dir` needs the package tensorboard. Install it: "
                'pip install "accumkit[tensorboard]"'
            ) from error
        self._writer = Writer(DirectoryOutput(os.fspath(directory)))

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Writes each column of each row as a scalar."""
        for row in rows:
            for name, value in row.items():
                if name != "optimizer_step" and not _is_missing(value):
                    self._writer.add_scalar(
                        f"optimizer_step/{name}",
                        float(value),
                        row["optimizer_step"],
                    )
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
