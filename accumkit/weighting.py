"""The weight D_i of a micro-batch in its window: what its loss divided by.

With the loss L_i = (1/D_i) Σ w·l of micro-batch i and its gradient g_i, the
gradient of the large batch is (1/D) Σ D_i·g_i with D = Σ D_i, for any
partition.
"""

from dataclasses import dataclass
from typing import Any

from keras import ops

from accumkit import keras_internals, messages
from accumkit.observation import Observation, batch_size, observed_losses
from accumkit.window_state import WindowState


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
    if not state.inspected and not model.trainable_weights:
        messages.warn_once(
            warned,
            "no weights",
            f"The model {model.name!r} has no trainable weights: training "
            "will change nothing. Set `trainable = True` on the layers to be "
            "trained and call `compile` again.",
            stacklevel=2,
        )
    state.inspected = True
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


def weights_late(model: Any, state: WindowState) -> bool:
    """Whether gradients are multiplied by D_i after the backward pass.

    A float16 backward pass overflows if the loss is multiplied by its number
    of tokens, say; the gradients are then, in float32.
    """
    if state.float16 is None:
        state.float16 = keras_internals.computes_in_float16(model)
    return state.float16


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
