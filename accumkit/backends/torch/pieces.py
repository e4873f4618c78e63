"""Cutting a batch into pieces on torch, and looping over them."""

from collections.abc import Callable
from typing import Any

import keras

from accumkit import checks


def cut(batch: Any, size: int) -> tuple[list[Any], Any, int]:
    """Cuts a batch into pieces, all but the last of the same size.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
        size: Samples in a piece.

    Returns:
        The full pieces, for `loop`; the last piece; and the number of all.

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

    starts = range(0, max(shapes[0][0], 1), size)
    *full, last = [piece(start) for start in starts]
    return full, last, len(starts)


def loop(
    body: Callable[[Any, Any, int], Any], carry: Any, full: list[Any]
) -> Any:
    """Runs `body` over the full pieces, one after the other.

    Args:
        body: `(carry, piece, index) -> carry`.
        carry: What the first piece takes over.
        full: What `cut` returned.

    Returns:
        What the last piece hands on.
    """
    for index, piece in enumerate(full):
        carry = body(carry, piece, index)
    return carry
