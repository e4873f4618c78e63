"""Cutting a batch into pieces on TensorFlow, and looping over them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accumkit import observation
from accumkit.backends.tensorflow import lengths


def cut(batch: Any, size: int, compiled: bool) -> tuple[Any, Any, Any]:
    """Cuts a batch into full pieces and a last one, which may be smaller.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
        size: Samples in a piece.
        compiled: Whether XLA compiles the train step.

    Returns:
        The full pieces, for `loop`; a function of the loop's last carry that
        returns the last piece; and the number of all pieces.

    Raises:
        ValueError: If a leaf has no batch axis, or another length than the
            rest. Where lengths are not known before the graph runs, an op of
            the graph fails then, which `lengths.telling` translates.
    """
    batch = lengths.checked(batch)
    samples = observation.batch_size(batch[0])
    if isinstance(samples, int):
        before = max((samples - 1) // size, 0)
    else:
        before = tf.maximum((samples - 1) // size, 0)
    rows = _padded(batch, size) if compiled else batch

    def last(carry: Any) -> Any:
        loops = not (isinstance(before, int) and before == 0)
        if loops and not tf.executing_eagerly():
            # Or the graph runs the last piece beside the loop, and the
            # activations of two pieces are alive at once.
            with tf.control_dependencies(keras.tree.flatten(carry)):
                return _rest(batch, tf.identity(before * size))
        return _rest(batch, before * size)

    return (rows, before, size), last, before + 1


def loop(
    body: Callable[[Any, Any, Any], Any],
    carry: list[Any],
    full: Any,
    outputs: Callable[[Any], Any],
) -> tuple[list[Any], Any]:
    """Runs `body` over the full pieces, one after the other.

    Args:
        body: `(carry, piece, index) -> (carry, outputs)`; None for outputs
            that are not to be kept.
        carry: Tensors that the first piece takes over.
        full: What `cut` returned.
        outputs: `piece -> outputs`, as `body` returns them. The loop of a graph
            must know what they look like before it has computed any.

    Returns:
        What the last piece hands on, and the outputs of all, joined; None if
        they were not kept.
    """
    rows, before, size = full
    if isinstance(before, int) and before == 0:
        return carry, None
    if tf.executing_eagerly():
        several = []
        for index in range(before):
            piece = _full(rows, index * size, size)
            carry, y_pred = body(carry, piece, index)
            several.append(y_pred)
        return carry, None if several[0] is None else joined(several)
    like: Any = None

    def look() -> None:
        nonlocal like
        like = outputs(_full(rows, 0, size))

    # Traced, and never run.
    tf.function(look, autograph=False).get_concrete_function()
    leaves = [] if like is None else keras.tree.flatten(like)
    kept = [
        tf.TensorArray(leaf.dtype, before, element_shape=leaf.shape)
        for leaf in leaves
    ]

    def one(index: Any, kept: Any, *carried: Any) -> tuple[Any, ...]:
        piece = _full(rows, index * size, size)
        new, y_pred = body(list(carried), piece, index)
        if kept:
            flat = keras.tree.flatten(y_pred)
            kept = [k.write(index, v) for k, v in zip(kept, flat, strict=True)]
        return index + 1, kept, *new

    _, kept, *carry = tf.while_loop(
        lambda index, *_: index < before,
        one,
        [0, kept, *carry],
        parallel_iterations=1,
    )
    if not leaves:
        return carry, None
    stacked = [
        tf.reshape(array.stack(), [-1, *leaf.shape[1:]])
        for array, leaf in zip(kept, leaves, strict=True)
    ]
    return carry, keras.tree.pack_sequence_as(like, stacked)


def joined(outputs: list[Any]) -> Any:
    """The outputs of a batch from those of its pieces, in order.

    Args:
        outputs: Of some pieces each, of one structure.
    """
    return keras.tree.map_structure(
        lambda *leaves: tf.concat(leaves, 0), *outputs
    )


def first_rows(x: Any, rows: int) -> Any:
    """Some inputs, to be looked at.

    Args:
        x: Inputs of a batch that has as many, or in a trace.
        rows: How many.
    """
    return _full(x, 0, rows)


def _padded(batch: Any, size: int) -> Any:
    """The batch with at least `size` rows.

    XLA compiles the loop over full pieces also for a batch that is smaller
    than one and never enters it; the slice must fit all the same.
    """

    def pad(value: Any) -> Any:
        if value is None:
            return None
        missing = tf.maximum(size - tf.shape(value)[0], 0)
        rows = [[0, missing], *[[0, 0]] * (value.shape.rank - 1)]
        return tf.pad(value, rows)

    return keras.tree.map_structure(pad, batch)


def _full(batch: Any, start: Any, size: int) -> Any:
    """The piece of `size` samples from `start`, its size static."""

    def cut(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tf.RaggedTensor):
            return value[start : start + size]
        if isinstance(value, tf.SparseTensor):
            return _cut_sparse(value, start, size)
        # XLA takes a slice from anywhere, if its size is constant.
        inner = value.shape[1:]
        if inner.is_fully_defined():
            zeros = [0] * len(inner)
            piece = tf.slice(value, [start, *zeros], [size, *inner])
        else:
            inner = tf.shape(value)[1:]
            piece = tf.slice(
                value,
                tf.concat([[start], tf.zeros_like(inner)], 0),
                tf.concat([[size], inner], 0),
            )
        piece.set_shape([size, *value.shape[1:]])
        return piece

    return keras.tree.map_structure(cut, batch)


def _rest(batch: Any, start: Any) -> Any:
    """Everything from `start` on."""

    def cut(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tf.SparseTensor):
            return _cut_sparse(value, start, None)
        return value[start:]

    return keras.tree.map_structure(cut, batch)


def _cut_sparse(value: Any, start: Any, size: int | None) -> Any:
    shape = value.dense_shape
    start = tf.cast(start, shape.dtype)
    length = shape[0] - start if size is None else tf.cast(size, shape.dtype)
    piece = tf.sparse.slice(
        value,
        tf.concat([[start], tf.zeros_like(shape[1:])], 0),
        tf.concat([[length], shape[1:]], 0),
    )
    # Layers build on the static shape, which `tf.sparse.slice` loses.
    piece.set_shape([size, *value.shape[1:]])
    return piece
