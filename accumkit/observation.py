"""What a loss divided by, observed while Keras computes it.

Working it out again from shapes, masks and reductions would be a second truth
beside Keras's own.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from accumkit import keras_internals


@dataclass
class Observation:
    """One output's loss, as Keras computed it.

    `kind` says what its reduction divided by: "sum" (nothing), "values" (the
    number of loss values), "mask" (of those that are not masked), "weights"
    (the sum of the sample weights), "batch" (unknown; a loss function that
    returned one number). `couples`: the loss is known to look at several
    samples at once.
    """

    name: str
    kind: str
    count: Any = None
    per_sample: int | None = None
    sources: tuple[int, ...] = ()
    couples: bool = False


@contextlib.contextmanager
def observed_losses(model: Any) -> Iterator[list[Observation]]:
    """Records what the compiled losses divide by while they are computed.

    Args:
        model: A compiled model; its `compile_loss` must be built.

    Yields:
        A list that fills as `model.compute_loss` runs in the `with` block.
    """
    seen: list[Observation] = []
    compiled = keras_internals.compile_loss(model)
    if compiled is None:
        yield seen
        return
    with keras_internals.unmistakable_targets(compiled):
        if keras_internals.overrides_compute_loss(model):
            yield seen
            return
        with keras_internals.replaced_losses(
            compiled,
            lambda loss, name: _Observer(loss, name, seen),
            _CountedMean,
        ):
            yield seen


class _Observer:
    """Stands in for one output's loss and notes what it divides by."""

    def __init__(self, loss: Any, name: str, seen: list[Observation]):
        self.loss = loss
        self.name = name
        self.seen = seen
        self.samples: Any = None

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        self.samples = batch_size(y_pred)
        in_mask = keras_internals.get_keras_mask(y_pred)
        kept: list[Any] = []
        call = self.loss.call

        def keep(*args, **kwargs):
            kept.append(call(*args, **kwargs))
            return kept[-1]

        # On the instance, and only while it runs: the values of the loss (and
        # the mask that it may hang on them) exist nowhere outside.
        self.loss.call = keep
        try:
            result = self.loss(y_true, y_pred, sample_weight)
        finally:
            del self.loss.call
        values = kept[0] if len(kept) == 1 else None
        if _is_one_number(values, y_pred):
            values = None
        observation = _observe(
            self.name, self.loss, values, in_mask, sample_weight
        )
        observation.couples = _couples(self.loss)
        self.seen.append(observation)
        return result


class _CountedMean:
    """Stands in for the metric that averages one output's loss.

    Keras weights it by the static batch size, which TensorFlow does not know:
    a small last piece would count as much as one sample, or as a full batch.
    """

    def __init__(self, metric: Any, observer: _Observer):
        self.metric = metric
        self.observer = observer

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.metric.update_state(value, sample_weight=self.observer.samples)


def _is_one_number(values: Any, y_pred: Any) -> bool:
    """Whether a loss made one number of several samples."""
    # A Python number has no shape.
    shape = tuple(getattr(values, "shape", ()))
    if not shape:
        return True
    first = keras.tree.flatten(y_pred)[0]
    return set(shape) == {1} and first.shape[0] != 1


def _couples(loss: Any) -> bool:
    """Whether a loss of Keras's is known to look at several samples at once."""
    losses = keras.losses
    if isinstance(loss, (losses.Dice, losses.Tversky)):
        return loss.axis is None or 0 in keras.tree.flatten(loss.axis)
    return isinstance(loss, losses.Circle) or (
        getattr(loss, "fn", None) is losses.circle
    )


def _observe(
    name: str, loss: Any, values: Any, in_mask: Any, sample_weight: Any
) -> Observation:
    reduction = getattr(loss, "reduction", None)
    if values is None:
        return Observation(name, "batch")
    if reduction in (None, "none", "sum"):
        return Observation(name, "sum")
    out_mask = keras_internals.get_keras_mask(values)
    masks = [m for m in (in_mask, out_mask) if m is not None]
    sources = tuple(id(m) for m in masks)
    mask = masks[0] if len(masks) == 1 else None
    if len(masks) == 2:
        mask = ops.logical_and(*masks)
    if reduction == "mean_with_sample_weight" and (
        mask is not None or sample_weight is not None
    ):
        if sample_weight is not None:
            sources += (id(sample_weight),)
            # A copy: `apply_mask` works in place on torch.
            sample_weight = ops.copy(
                ops.convert_to_tensor(sample_weight, values.dtype)
            )
        merged = keras_internals.apply_mask(
            sample_weight, mask, dtype=values.dtype, reduction=reduction
        )
        merged = ops.cast(merged, values.dtype)
        _, merged = keras_internals.squeeze_or_expand_to_same_rank(
            values, merged
        )
        return Observation(name, "weights", ops.sum(merged), sources=sources)
    if mask is not None:
        # One entry of the mask may stand for several loss values.
        each = _size(values) / _size(mask)
        count = ops.sum(ops.cast(mask, values.dtype)) * ops.cast(
            each, values.dtype
        )
        return Observation(name, "mask", count, sources=sources)
    inner = tuple(values.shape)[1:]
    per_sample = None if None in inner else math.prod(inner)
    return Observation(name, "values", _size(values), per_sample)


def _size(tensor: Any) -> Any:
    """The number of elements: an int where the shape is static."""
    if None not in tuple(tensor.shape):
        return math.prod(tensor.shape)
    return ops.prod(ops.convert_to_tensor(ops.shape(tensor), dtype="int32"))


def batch_size(x: Any) -> Any:
    """The number of samples in a (nested) input: an int or a scalar tensor."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return ops.shape(first)[0]
