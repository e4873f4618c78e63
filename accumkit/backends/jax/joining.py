"""Joining the outputs of pieces on JAX."""

from typing import Any

import jax
from jax import numpy as jnp


def joined(outputs: list[Any]) -> Any:
    """The outputs of a batch from those of its pieces, one after the other.

    Args:
        outputs: Of some pieces each, of one structure.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def in_order(full: Any, kept: Any, rest: Any) -> Any:
    """The outputs of a batch, in the order of its samples.

    Args:
        full: The full pieces, as `pieces.cut` returned them.
        kept: Their outputs, as `pieces.loop` returned them, or None.
        rest: Those of the last piece; None if all are full.
    """
    some = [part for part in (kept, rest) if part is not None]
    if full.shares == 1 or kept is None:
        return joined(some)
    rows = full.number * full.size

    def shares(value: Any, number: int) -> Any:
        """A share's rows together, the shares in front."""
        inner = value.shape[1:]
        each = (number, full.shares, -1, *inner)
        value = jnp.moveaxis(jnp.reshape(value, each), 1, 0)
        return jnp.reshape(value, (full.shares, -1, *inner))

    def ordered(*parts: Any) -> Any:
        if parts[0].shape[0] != rows:
            return jnp.concatenate(parts)  # one value a piece
        numbers = [full.number, 1][: len(parts)]
        value = jnp.concatenate(list(map(shares, parts, numbers)), 1)
        return jnp.reshape(value, (-1, *value.shape[2:]))

    return jax.tree.map(ordered, *some)
