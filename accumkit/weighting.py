"""What a loss divided by: the weight D_i of a micro-batch in its window.

With the loss L_i = (1/D_i) Σ w·l of micro-batch i and its gradient g_i, the
gradient of the large batch is (1/D) Σ D_i·g_i with D = Σ D_i, for any
partition. D_i is what the loss's reduction divided by, so it is observed while
Keras computes the loss instead of being worked out again from shapes.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from accumkit import keras_internals, messages
from accumkit.window_state import WindowState


@dataclass
class Observation:
    """One output's loss, as Keras computed it.

    `kind` says what its reduction divided by: "sum" (nothing), "values" (the
    number of loss values), "mask" (of those that are not masked), "weights"
    (the sum of the sample weights), "batch" (unknown; a loss function that
    returned one number).
    """

    name: str
    kind: str
    count: Any = None
    per_sample: int | None = None
    sources: tuple[int, ...] = ()


@dataclass
class Weight:
    """The weight of a micro-batch in its window.

    Attributes:
        value: D_i, a number or a scalar tensor.
        divides: False where the window's gradients are summed and never
            divided (every loss has `reduction="sum"`).
        proportional: Whether D_i is a constant times the number of samples,
            so that a share of D is known before D is.
    """

    value: Any
    divides: bool = True
    proportional: bool = False


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
    if compiled is None or keras_internals.overrides_compute_loss(model):
        yield seen
        return
    with keras_internals.replaced_losses(
        compiled, lambda loss, name: _Observer(loss, name, seen)
    ):
        yield seen


class _Observer:
    """Stands in for one output's loss and notes what it divides by."""

    def __init__(self, loss: Any, name: str, seen: list[Observation]):
        self.loss = loss
        self.name = name
        self.seen = seen

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
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
        self.seen.append(
            _observe(self.name, self.loss, values, in_mask, sample_weight)
        )
        return result


def _observe(
    name: str, loss: Any, values: Any, in_mask: Any, sample_weight: Any
) -> Observation:
    reduction = getattr(loss, "reduction", None)
    if values is None or len(values.shape) == 0:
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


def loss_and_weight(
    model: Any, state: WindowState, batch: Any, y_pred: Any
) -> tuple[Any, Weight]:
    """Computes a micro-batch's loss and what it weighs in its window.

    Args:
        model: The model; its compiled loss must be built.
        state: Its window.
        batch: `(x, y, sample_weight)`, any nesting, batch first.
        y_pred: Predictions, with their masks.

    Returns:
        The loss L_i, and a `Weight`.
    """
    x, y, sample_weight = batch
    with observed_losses(model) as observations:
        loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight)
    weight = _weight(model, state, observations, batch, y_pred)
    return loss, weight


def _weight(
    model: Any,
    state: WindowState,
    observations: list[Observation],
    batch: Any,
    y_pred: Any,
) -> Weight:
    x, y, sample_weight = batch
    warned = state.warned
    if not model.trainable_weights:
        messages.warn_once(
            warned,
            "no weights",
            f"The model {model.name!r} has no trainable weights: training "
            "will change nothing. Set `trainable = True` on the layers to be "
            "trained and call `compile` again.",
            stacklevel=2,
        )
    if state.weighting == "uniform":
        return Weight(1)
    own = model.accumulation_weight(x, y, y_pred, sample_weight)
    if own is not None:
        return Weight(own)
    samples = batch_size(x)
    if not observations:
        return Weight(samples, proportional=True)
    first = observations[0]
    kinds = {o.kind for o in observations}
    names = ", ".join(f"{o.name!r} ({o.kind})" for o in observations)
    if kinds == {"sum"}:
        _warn_of_added_losses(model, "the sum over the window", warned)
        return Weight(1, divides=False)
    if kinds <= {"mask", "weights"}:
        _warn_of_added_losses(model, "the window's tokens or weights", warned)
    if len(observations) == 1:
        return Weight(samples if first.kind == "batch" else first.count)
    if all(o.kind == "batch" or o.per_sample is not None for o in observations):
        return Weight(samples)
    same = all(
        (o.kind, o.sources) == (first.kind, first.sources) for o in observations
    )
    if same and first.kind in ("mask", "weights"):
        return Weight(first.count)
    messages.warn_once(
        warned,
        "denominators",
        f"The losses of the outputs {names} are averaged over different "
        "numbers of values in each micro-batch. One window cannot weight both "
        "exactly; micro-batches are weighted by their number of samples. For "
        "other weights override `accumulation_weight` in the model.",
        stacklevel=2,
    )
    return Weight(samples)


def _warn_of_added_losses(model: Any, over: str, warned: set[str]) -> None:
    penalties = sum(v.regularizer is not None for v in model.trainable_weights)
    if len(model.losses) <= penalties:
        return
    messages.warn_once(
        warned,
        "added losses",
        "The model adds losses of its own (`add_loss`, activity "
        "regularizers), which are averages over a micro-batch's samples, to a "
        f"compiled loss that counts {over}. One window cannot weight both "
        "exactly; the compiled loss is exact. For other weights override "
        "`accumulation_weight` in the model.",
        stacklevel=2,
    )


def window_loss(model: Any, loss: Any, weight: Weight, is_first: Any) -> Any:
    """Returns the loss whose gradients add up to the window's.

    Where nothing is divided, a penalty on the weights would be counted once
    per micro-batch. The weights do not change within a window, so it is kept
    in the first micro-batch only.

    Args:
        model: The model, after `loss` was computed.
        loss: Scalar tensor (or values to be summed), the micro-batch's loss.
        weight: The micro-batch's weight.
        is_first: Bool or scalar bool tensor, whether it opens the window.

    Returns:
        `loss` itself, unless nothing is divided and the model has penalties.
    """
    if weight.divides or not model.losses:
        return loss
    penalty = sum(keras_internals.added_loss(model, v) for v in model.losses)
    return ops.where(is_first, loss, loss - penalty)
