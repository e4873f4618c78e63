"""Cutting a batch into pieces on torch."""

from typing import Any

import keras

from accumkit import checks


def cut(batch: Any, size: int) -> list[Any]:
    """Cuts a batch into pieces, all but the last of the same size.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
        size: Samples in a piece.

    Returns:
        The pieces, at least one.

    Raises:
        ValueError: If a leaf has no batch axis, or another length than the
            rest.
    """
    leaves = [v for v in keras.tree.flatten(batch) if v is not None]
    shapes = [tuple(v.shape) for v in leaves]
    checks.rows_to_cut(shapes)

    def piece(start: int) -> Any:
        return keras.tree.map_structure(
            lambda v: None if v is None else v[start : start + size], batch
        )

    return [piece(start) for start in range(0, max(shapes[0][0], 1), size)]
