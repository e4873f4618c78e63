"""Cutting a batch into pieces on JAX, and looping over them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import keras
from jax import numpy as jnp
from jax.experimental import sparse

from accumkit import checks
from accumkit.backends.jax.joining import joined

# Unrolled further, compiling takes longer than it saves.
_MOST_UNROLLED = 64


class Full(NamedTuple):
    """The full pieces of a batch.

    Attributes:
        stacked: Dense leaves, the pieces in front of the batch axis.
        sparse: Sparse leaves, whole.
        structure: Of the batch; which leaf is which.
        number: How many pieces there are.
        size: Samples in a piece.
        shares: Over how many devices the batch is spread; each piece has rows
            of all.
    """

    stacked: list[Any]
    sparse: list[Any]
    structure: Any
    number: int
    size: int
    shares: int

    @property
    def in_order(self) -> bool:
        """Whether the pieces, one after the other, are the batch."""
        return self.shares == 1

    def piece(self, index: Any, dense: list[Any]) -> Any:
        """Puts a piece together.

        Args:
            index: Which one.
            dense: Its dense leaves.
        """
        start = index * self.size
        rows = [_rows(v, start, self.size) for v in self.sparse]
        return _filled(self.structure, dense, rows)


def cut(
    batch: Any, size: int, keep_last: bool
) -> tuple[Full, Callable[[Any], tuple[Any, Any]], int]:
    """Cuts a batch into full pieces and a last one, which may be smaller.

    Where the batch is spread over several devices each device cuts its own
    share, so that no sample moves: a piece is then made of the samples from
    every share.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
        size: Samples in a piece.
        keep_last: Whether the last piece is kept out of the full ones even if
            it is as large.

    Returns:
        The full pieces, for `loop`; a function of the loop's last carry that
        returns the carry and the last piece (None if all are full); and the
        number of all pieces.

    Raises:
        ValueError: If a leaf has no batch axis, or another length than the
            rest.
    """
    leaves = [v for v in keras.tree.flatten(batch) if v is not None]
    shapes = [tuple(v.shape) for v in leaves]
    checks.rows_to_cut(shapes)
    rows = shapes[0][0]
    shares = _shares(rows) if not any(map(_is_sparse, leaves)) else 1
    share, each = rows // shares, max(size // shares, 1)
    count = max(-(-share // each), 1)
    full = count - 1 if keep_last or share % each or not share else count
    before = full * each

    def stacked(value: Any) -> Any:
        inner = value.shape[1:]
        value = jnp.reshape(value, (shares, share, *inner))[:, :before]
        value = jnp.reshape(value, (shares, full, each, *inner))
        value = jnp.moveaxis(value, 1, 0)
        return jnp.reshape(value, (full, shares * each, *inner))

    def rest(value: Any, start: Any) -> Any:
        inner = value.shape[1:]
        value = jnp.reshape(value, (shares, share, *inner))
        value = jax.lax.dynamic_slice_in_dim(value, start, share - before, 1)
        return jnp.reshape(value, (-1, *inner))

    def last(carry: Any) -> tuple[Any, Any]:
        if full == count:
            return carry, None
        # Or XLA works the last piece off beside the loop, and the activations
        # of two pieces are alive at once.
        start = before + _known_after(carry) if full else before
        rows = [_rows(v, start, share - before) for v in whole]
        return carry, _filled(structure, [rest(v, start) for v in dense], rows)

    dense = [v for v in leaves if not _is_sparse(v)]
    whole = [v for v in leaves if _is_sparse(v)]
    structure = keras.tree.map_structure(
        lambda v: v if v is None else "sparse" if _is_sparse(v) else "dense",
        batch,
    )
    pieces = Full(
        [stacked(v) for v in dense],
        whole,
        structure,
        full,
        shares * each,
        shares,
    )
    return pieces, last, count


def loop(
    body: Callable[[Any, Any], Any], carry: Any, full: Full
) -> tuple[Any, Any]:
    """Runs `body` over the full pieces: `lax.scan`.

    Unrolled where XLA runs the body faster outside a loop: on a CPU
    convolutions inside a loop miss the library that they use outside of it,
    and run several times slower; matrix products do not.

    Args:
        body: `(carry, piece) -> (carry, outputs)`; None for outputs that are
            not to be kept.
        carry: What the first piece takes over.
        full: What `cut` returned.

    Returns:
        What the last piece hands on, and the outputs of all, joined; None if
        they were not kept.
    """
    if full.number == 0:
        return carry, None

    def one(carry: Any, given: Any) -> tuple[Any, Any]:
        index, dense = given
        return body(carry, full.piece(index, dense))

    def given(index: int) -> Any:
        return index, [v[index] for v in full.stacked]

    if jax.default_backend() == "cpu" and full.number <= _MOST_UNROLLED:
        if "conv_general_dilated" in str(jax.make_jaxpr(one)(carry, given(0))):
            kept = []
            for index in range(full.number):
                carry, outputs = one(carry, given(index))
                kept.append(outputs)
            return carry, None if kept[0] is None else joined(kept)
    pieces = jnp.arange(full.number), full.stacked
    carry, outputs = jax.lax.scan(one, carry, pieces)
    return carry, jax.tree.map(
        lambda v: jnp.reshape(v, (-1, *v.shape[2:])), outputs
    )


def some_rows(full: Full) -> list[Any]:
    """A piece's rows, and one row more; to look at, not to compute with.

    Args:
        full: The full pieces of a batch that has more than one.
    """

    def rows(number: int) -> Any:
        dense = [
            jax.ShapeDtypeStruct((number, *v.shape[2:]), v.dtype)
            for v in full.stacked
        ]
        sparse = [_rows(v, 0, number) for v in full.sparse]
        return _filled(full.structure, dense, sparse)

    return [rows(full.size), rows(full.size + 1)]


def _known_after(carry: Any) -> Any:
    """Zero, of which XLA does not know before it has all of `carry`.

    An optimization barrier would say it, but XLA takes it away before it
    decides what runs when.
    """
    leaves = [v for v in jax.tree.leaves(carry) if v.size]
    leaves = [v for v in leaves if jnp.issubdtype(v.dtype, jnp.inexact)]
    if not leaves:
        return 0
    some = [jnp.ravel(v)[0].astype("float32") for v in leaves]
    bits = jax.lax.bitcast_convert_type(jnp.stack(some), jnp.uint32)
    return (jnp.bitwise_or.reduce(bits & 1) >> 1).astype("int32")


def _filled(structure: Any, dense: list[Any], rows: list[Any]) -> Any:
    """A batch of the structure with these dense and sparse leaves."""
    left = {"dense": list(dense), "sparse": list(rows)}
    return keras.tree.map_structure(
        lambda kind: None if kind is None else left[kind].pop(0), structure
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


def _is_sparse(value: Any) -> bool:
    return isinstance(value, sparse.JAXSparse)


def _rows(value: Any, start: Any, size: int) -> Any:
    """Rows of a sparse matrix; the others become padding, which counts 0.

    The number of stored entries is static, so all of them stay.
    """
    rows = value.indices[:, 0] - start
    inside = (rows >= 0) & (rows < size)
    data = jnp.where(inside, value.data, 0)
    indices = jnp.where(
        inside[:, None],
        value.indices.at[:, 0].set(rows),
        jnp.asarray((size, *value.shape[1:]), value.indices.dtype),
    )
    shape = (size, *value.shape[1:])
    return sparse.BCOO((data, indices), shape=shape)
