"""The optimizer's step on TensorFlow, and what a recorder notes of it."""

import contextlib
import warnings
from typing import Any

import tensorflow as tf

from accumkit import keras_internals, recording
from accumkit.messages import AccumkitWarning


def step(
    strategy: Any,
    optimizer: Any,
    sums: Any,
    divisor: Any,
    variables: list[Any],
    got: set[int],
    flags: dict[int, Any],
) -> None:
    """Takes an optimizer step, in cross-replica context.

    Args:
        strategy: The strategy whose context it is.
        optimizer: The optimizer.
        sums: The window's `Sums`.
        divisor: What they are divided by, or None.
        variables: What may have a gradient.
        got: Ids of those that have one.
        flags: By id, whether one of the rest has, where only the device knows.
    """

    def replica() -> None:
        known = got | flags.keys()
        gradients = [
            sums.mean(v, divisor) if id(v) in known else None for v in variables
        ]
        # What Keras's train step calls here, so that an override of it is
        # used.
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        sums.end()

    with _guarded(optimizer, variables, flags):
        strategy.extended.call_for_each_replica(replica)


def _guarded(
    optimizer: Any, variables: list[Any], flags: dict[int, Any]
) -> contextlib.AbstractContextManager[None]:
    """Has an optimizer leave alone what has no gradient.

    Zeros instead of None would let decay and momentum move a variable.
    """
    if not flags:
        return contextlib.nullcontext()
    unsure = [v for v in variables if id(v) in flags]
    # Decay is applied before the update: put back what it moved.
    before = [tf.identity(tf.convert_to_tensor(v.value)) for v in unsure]

    def guard(index: int, variable: Any, update: Any) -> None:
        def updated():
            update()
            return True

        def put_back():
            variable.assign(before[index])
            return False

        tf.cond(flags[id(unsure[index])], updated, put_back)

    return keras_internals.guarded_updates(optimizer, unsure, guard)


@contextlib.contextmanager
def recorded(recorder: Any, optimizer: Any, sums: Any, divisor: Any) -> Any:
    """Has a recorder, if there is one, note the step taken in the block.

    Args:
        recorder: A `WindowRecorder`, or None.
        optimizer: The optimizer.
        sums: The window's sums of gradients.
        divisor: What they are divided by, or None.
    """
    if recorder is None:
        yield
        return
    rate = tf.convert_to_tensor(optimizer.learning_rate)
    before = tf.convert_to_tensor(optimizer.iterations)
    norm: Any = 0.0
    if recorder.gradient_norm:
        scale = optimizer.scale_loss(tf.ones(()))
        norm = recording.gradient_norm(sums.all(), scale)
        if divisor is not None:
            norm /= tf.cast(divisor, norm.dtype)
    yield
    after = tf.convert_to_tensor(optimizer.iterations)
    recorder.close(rate, norm, after - before)


def warn_of_missing(variables: list[Any]) -> None:
    """Warns of variables without a gradient in a trace.

    Args:
        variables: The variables.
    """
    # As Keras does where an optimizer gets None; ours gets a flag.
    if variables:
        warnings.warn(
            "Gradients do not exist for variables "
            f"{[v.path for v in variables]} in a train step that is traced. "
            "They stay as they are in a window in which no other train step "
            "has any for them.",
            AccumkitWarning,
            stacklevel=2,
        )
