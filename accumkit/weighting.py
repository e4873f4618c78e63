"""A micro-batch's loss as it enters its window, the same on all backends.

With the loss L_i = (1/D_i) Σ w·l of micro-batch i and its gradient g_i, the
gradient of the large batch is (1/D) Σ D_i·g_i with D = Σ D_i, for any
partition.
"""

from dataclasses import dataclass
from typing import Any

from keras import ops

from accumkit import added_losses, denominators, keras_internals
from accumkit.accumulation import Accumulation
from accumkit.denominators import Weight
from accumkit.observation import batch_size, observed_losses


@dataclass
class MicroBatch:
    """What a train step needs to know of a micro-batch's loss.

    Attributes:
        objective: What is differentiated: the loss as it enters the window,
            scaled by the optimizer.
        contribution: The loss as it enters the window's (and the log's) loss.
        divisor: What the sum of contributions, and of gradients, is divided
            by is the sum of these; None: nothing is divided.
        late: What the gradients are still to be multiplied by, or None.
    """

    objective: Any
    contribution: Any
    divisor: Any = None
    late: Any = None


def weigh(
    model: Any,
    accumulation: Accumulation,
    batch: Any,
    y_pred: Any,
    is_first: Any,
    samples: Any,
    replicas: int = 1,
) -> MicroBatch:
    """Computes a micro-batch's loss as it enters its window.

    Args:
        model: The model; its compiled loss must be built.
        accumulation: The model's options and findings.
        batch: `(x, y, sample_weight)`, any nesting, batch first.
        y_pred: Predictions, with their masks.
        is_first: Bool or scalar bool tensor, whether it opens the window.
        samples: Samples of the whole batch that it is a piece of.
        replicas: By how many Keras has divided the loss (TensorFlow); their
            gradients are summed. Defaults to `1`.

    Returns:
        A `MicroBatch`.
    """
    loss, weight = _loss_and_weight(model, accumulation, batch, y_pred)
    objective, divisor, late = loss, None, None
    shown = loss * replicas if replicas > 1 else loss
    if accumulation.whole:
        contribution = shown
    elif not weight.divides:
        objective = contribution = added_losses.once_per_window(
            model, loss, is_first
        )
        if replicas > 1:
            contribution = contribution * replicas
    elif _share_is_known(accumulation, weight, replicas):
        # D is known beforehand: dividing each loss spares a pass over the
        # gradients, and values that are added up can stay whole.
        part = share(batch_size(batch[0]), samples, loss.dtype)
        whole = added_losses.summed_values(model)
        objective = part * loss
        if whole is not None:
            objective = part * (loss - whole) + whole
        contribution = objective
    else:
        divisor = _constant(weight.value)
        # Keras divides a replica's loss by the number of replicas; the sum
        # over the replicas is divided by D instead.
        factor = divisor * replicas if replicas > 1 else divisor
        contribution = _times(shown, divisor)
        if _weights_late(model, accumulation):
            late = factor
        else:
            objective = _times(loss, factor)
    return MicroBatch(
        model.optimizer.scale_loss(objective), contribution, divisor, late
    )


def _share_is_known(
    accumulation: Accumulation, weight: Weight, replicas: int
) -> bool:
    return weight.proportional and not accumulation.across and replicas == 1


def share(part: Any, total: Any, dtype: Any) -> Any:
    """A piece's share of the samples of its batch.

    Args:
        part: Samples in the piece: an int or a scalar tensor.
        total: Samples in the batch, likewise.
        dtype: What it is to be, where it is a tensor.

    Returns:
        A number or a scalar tensor.
    """
    if isinstance(part, int) and isinstance(total, int):
        return part / max(total, 1)
    total = ops.maximum(total, 1)
    return ops.cast(part, dtype) / ops.cast(total, dtype)


def _constant(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    return ops.stop_gradient(ops.convert_to_tensor(value))


def _times(loss: Any, factor: Any) -> Any:
    if isinstance(factor, (int, float)):
        return loss * factor
    return loss * ops.cast(factor, loss.dtype)


def _loss_and_weight(
    model: Any, accumulation: Accumulation, batch: Any, y_pred: Any
) -> tuple[Any, Weight]:
    x, y, sample_weight = batch
    with observed_losses(model) as observations:
        loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight)
    weight = denominators.weight_of(
        model, accumulation, observations, batch, y_pred
    )
    return loss, weight


def _weights_late(model: Any, accumulation: Accumulation) -> bool:
    """Whether gradients are multiplied by D_i after the backward pass.

    A float16 backward pass overflows if the loss is multiplied by its number
    of tokens, say; the gradients are then, in float32.
    """
    findings = accumulation.findings
    if findings.float16 is None:
        findings.float16 = keras_internals.computes_in_float16(model)
    return findings.float16
