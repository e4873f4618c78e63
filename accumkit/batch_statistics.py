"""The statistics that BatchNormalization layers compute while they train."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from accumkit import keras_internals


def active_layers(model: Any) -> dict[str, Any]:
    """Returns the BatchNormalization layers that training would update.

    Args:
        model: A model, built or not.

    Returns:
        Layers by path (`"backbone/block/bn"`), in the model's order.
    """
    return {
        path: layer
        for path, layer in keras_internals.all_layers(model).items()
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
    }


@contextlib.contextmanager
def observed(
    layers: dict[str, Any], note: Callable[[str, Any, Any, Any, Any], None]
) -> Iterator[None]:
    """Notes mean and variance of what goes through layers in training mode.

    With momentum 0 the moving values of a layer are, after it was called,
    what it has normalized with, masks and other replicas included. `note` has
    to put right what they should be.

    Args:
        layers: BatchNormalization layers by path.
        note: `(path, count, mean, variance, before)`, called after each call
            of a layer in training mode: how many values of each channel there
            were, a scalar; their moments, of shape `(channels,)`; and the
            moving mean and variance before.
    """
    originals = {path: layer.call for path, layer in layers.items()}

    def observer(path: str, layer: Any) -> Callable[..., Any]:
        def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if not (training and layer.trainable):
                return originals[path](inputs, training=training, mask=mask)
            moving = layer.moving_mean, layer.moving_variance
            # Copies: on torch a variable is changed in place.
            before = [ops.copy(v) for v in moving]
            momentum = layer.momentum
            layer.momentum = 0.0
            try:
                outputs = originals[path](inputs, training=True, mask=mask)
            finally:
                layer.momentum = momentum
            count = _count(layer, inputs, mask)
            mean, variance = (ops.copy(v) for v in moving)
            note(path, count, mean, variance, before)
            return outputs

        return call

    for path, layer in layers.items():
        # Past Keras's attribute tracking, where `__call__` finds it first.
        vars(layer)["call"] = observer(path, layer)
    try:
        yield
    finally:
        for layer in layers.values():
            del vars(layer)["call"]


def _count(layer: Any, inputs: Any, mask: Any) -> Any:
    if mask is not None:
        return ops.sum(ops.cast(mask, "float32"))
    channels = layer.axis % len(inputs.shape)
    sizes = [n for i, n in enumerate(ops.shape(inputs)) if i != channels]
    count = ops.convert_to_tensor(1.0, "float32")
    for size in sizes:
        count = count * ops.cast(size, "float32")
    return count
