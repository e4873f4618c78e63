"""Cutting a batch into pieces on TensorFlow, and looping over them."""

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accumkit import checks, observation

# Marks what an op of the graph says of lengths that differ.
_LENGTHS = "accumkit: lengths"


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
            the graph fails then, which `telling_lengths` translates.
    """
    batch = _checked(batch)
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
    body: Callable[[Any, Any, Any], Any], carry: list[Any], full: Any
) -> list[Any]:
    """Runs `body` over the full pieces, one after the other.

    Args:
        body: `(carry, piece, index) -> carry`.
        carry: Tensors that the first piece takes over.
        full: What `cut` returned.

    Returns:
        What the last piece hands on.
    """
    rows, before, size = full
    if isinstance(before, int) and before == 0:
        return carry

    def one(index: Any, *carried: Any) -> tuple[Any, ...]:
        piece = _full(rows, index * size, size)
        return index + 1, *body(list(carried), piece, index)

    _, *carry = tf.while_loop(
        lambda index, *_: index < before,
        one,
        [0, *carry],
        parallel_iterations=1,
    )
    return carry


def telling_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a train function: lengths that differ raise one clear error.

    Args:
        function: A train function whose graph may find out only when it runs
            that a batch cannot be cut.

    Returns:
        The function, raising `ValueError` for that with the lengths in it.
    """

    def train_function(*args: Any) -> Any:
        try:
            return function(*args)
        except tf.errors.InvalidArgumentError as error:
            found = re.search(rf"\[{_LENGTHS}\] \[([\d ]+)\]", error.message)
            if found is None:
                raise
            lengths = ", ".join(found[1].split())
            message = checks.cannot_be_cut(f"lengths {lengths}")
        raise ValueError(message)

    return train_function


def _checked(batch: Any) -> Any:
    # `train_on_batch` hands an eager step NumPy arrays as they are.
    batch = keras.tree.map_structure(
        lambda v: (
            v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v)
        ),
        batch,
    )
    leaves = [v for v in keras.tree.flatten(batch) if v is not None]
    shapes = [tuple(v.shape) for v in leaves]
    checks.rows_to_cut(shapes)
    rows = [observation.batch_size(v) for v in leaves]
    if all(isinstance(length, int) for length in rows):
        return batch
    lengths = tf.stack([tf.cast(length, "int32") for length in rows])
    equal = tf.debugging.Assert(
        tf.reduce_all(lengths == lengths[0]), [_LENGTHS, lengths], len(rows)
    )
    if tf.executing_eagerly():
        return batch
    with tf.control_dependencies([equal]):
        return keras.tree.map_structure(
            lambda v: tf.identity(v) if isinstance(v, tf.Tensor) else v, batch
        )


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
