"""Cutting a batch into pieces on JAX, and looping over them."""

from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import numpy as jnp

from accumkit import checks

# Unrolled further, compiling takes longer than it saves.
_MOST_UNROLLED = 64


def cut(batch: Any, size: int) -> tuple[Any, Any, int]:
    """Cuts a batch into pieces, all but the last of the same size.

    Where the batch is spread over several devices each device cuts its own
    share, so that no sample moves: a piece is then made of the samples from
    every share.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
        size: Samples in a piece.

    Returns:
        The first pieces, stacked in front of the batch axis; the last piece;
        and the number of all pieces.

    Raises:
        ValueError: If a leaf has no batch axis, or another length than the
            rest.
    """
    leaves = [v for v in keras.tree.flatten(batch) if v is not None]
    shapes = [tuple(v.shape) for v in leaves]
    checks.rows_to_cut(shapes)
    rows = shapes[0][0]
    shares = _shares(rows)
    share, each = rows // shares, max(size // shares, 1)
    count = max(-(-share // each), 1)
    before = (count - 1) * each

    def stacked(value: Any) -> Any:
        inner = value.shape[1:]
        value = jnp.reshape(value, (shares, share, *inner))[:, :before]
        value = jnp.reshape(value, (shares, count - 1, each, *inner))
        value = jnp.moveaxis(value, 1, 0)
        return jnp.reshape(value, (count - 1, shares * each, *inner))

    def rest(value: Any) -> Any:
        inner = value.shape[1:]
        value = jnp.reshape(value, (shares, share, *inner))[:, before:]
        return jnp.reshape(value, (-1, *inner))

    return _map(stacked, batch), _map(rest, batch), count


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    return keras.tree.map_structure(
        lambda v: None if v is None else function(v), batch
    )


def _shares(rows: int) -> int:
    """Over how many devices the batch axis is spread."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    axis = mesh.axis_names.index(distribution.batch_dim_name)
    shares = mesh.shape[axis]
    return shares if rows % shares == 0 else 1


def scan(
    body: Callable[[Any, Any], tuple[Any, None]], carry: Any, stacked: Any
) -> tuple[Any, None]:
    """`lax.scan`, unrolled where XLA runs the body faster outside a loop.

    On a CPU convolutions inside a loop miss the library that they use outside
    of it, and run several times slower; matrix products do not.

    Args:
        body: `(carry, piece) -> (carry, None)`.
        carry: What the first piece takes over.
        stacked: The pieces, stacked in front of the batch axis.

    Returns:
        What the last piece hands on, and None.
    """
    length = jax.tree.leaves(stacked)[0].shape[0]

    def piece(index: int) -> Any:
        return jax.tree.map(lambda v: v[index], stacked)

    if jax.default_backend() == "cpu" and length <= _MOST_UNROLLED:
        if "conv_general_dilated" in str(jax.make_jaxpr(body)(carry, piece(0))):
            for index in range(length):
                carry, _ = body(carry, piece(index))
            return carry, None
    return jax.lax.scan(body, carry, stacked)
