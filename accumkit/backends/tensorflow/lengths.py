"""Lengths that differ: a batch that cannot be cut, found out in a graph too."""

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accumkit import checks, observation

# Marks what an op of the graph says of lengths that differ.
_LENGTHS = "accumkit: lengths"


def checked(batch: Any) -> Any:
    """Returns a batch as tensors; raises if it cannot be cut.

    Args:
        batch: `(x, y, sample_weight)`, any nesting; None leaves are fine.
    """
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


def telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a train function: lengths that differ raise one clear error.

    Args:
        function: A train function whose graph may find out only when it runs
            that a batch cannot be cut; the result raises `ValueError` then.
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
