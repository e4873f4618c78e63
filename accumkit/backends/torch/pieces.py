"""Cutting a batch into pieces on torch, and looping over them."""

from collections.abc import Callable
from typing import Any

import keras
import torch

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
) -> tuple[Any, list[Any]]:
    """Runs `body` over the full pieces, one after the other.

    Args:
        body: `(carry, piece, index) -> (carry, outputs)`; None for outputs
            that are not to be kept.
        carry: What the first piece takes over.
        full: What `cut` returned.

    Returns:
        What the last piece hands on, and the outputs that were kept.
    """
    kept = []
    for index, piece in enumerate(full):
        carry, outputs = body(carry, piece, index)
        if outputs is not None:
            # Without the graph that computed them.
            kept.append(keras.tree.map_structure(torch.detach, outputs))
    return carry, kept


def joined(outputs: list[Any]) -> Any:
    """The outputs of a batch from those of its pieces, in order.

    Args:
        outputs: Of each piece, of one structure.
    """
    return keras.tree.map_structure(
        lambda *leaves: torch.cat([v.detach() for v in leaves]), *outputs
    )
