"""The weight D_i of a micro-batch in its window: what its loss divided by."""

from dataclasses import dataclass
from typing import Any

from accumkit import added_losses, keras_internals, messages
from accumkit.accumulation import Accumulation
from accumkit.observation import Observation, batch_size


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


def weight_of(
    model: Any,
    accumulation: Accumulation,
    observations: list[Observation],
    batch: Any,
    y_pred: Any,
) -> Weight:
    """Finds out what the loss of a micro-batch was divided by.

    Args:
        model: The model, after its loss was computed.
        accumulation: The model's options and findings.
        observations: What was observed of its compiled losses.
        batch: `(x, y, sample_weight)`, any nesting, batch first.
        y_pred: Predictions, with their masks.

    Returns:
        A `Weight`.
    """
    x, y, sample_weight = batch
    warned = accumulation.warned
    asks = not accumulation.findings.inspected
    accumulation.findings.inspected = True
    if asks and not model.trainable_weights:
        messages.warn_once(
            warned,
            "no weights",
            f"The model {model.name!r} has no trainable weights: training "
            "will change nothing. Set `trainable = True` on the layers to be "
            "trained and call `compile` again.",
            stacklevel=2,
        )
    if accumulation.weighting == "uniform":
        return Weight(1)
    own = model.accumulation_weight(x, y, y_pred, sample_weight)
    if own is not None:
        return Weight(own)
    samples = batch_size(x)
    if accumulation.whole:
        return Weight(samples)
    if not observations:
        return _without_compiled_loss(model, accumulation, samples)
    if not accumulation.over_batch:
        _warn_of_coupling(observations, warned)
    first = observations[0]
    kinds = {o.kind for o in observations}
    if kinds == {"sum"}:
        added_losses.warn_of_means(model, "the sum over the window", warned)
        return Weight(1, divides=False)
    if kinds <= {"mask", "weights"}:
        added_losses.warn_of_means(
            model, "the window's tokens or weights", warned
        )
    if asks:
        added_losses.warn_of_values(model, warned)
    if len(observations) == 1:
        return Weight(samples if first.kind == "batch" else first.count)
    if all(o.kind == "batch" or o.per_sample is not None for o in observations):
        return Weight(samples)
    same = all(
        (o.kind, o.sources) == (first.kind, first.sources) for o in observations
    )
    if same and first.kind in ("mask", "weights"):
        return Weight(first.count)
    names = ", ".join(f"{o.name!r} ({o.kind})" for o in observations)
    messages.warn_once(
        warned,
        "denominators",
        f"The losses of the outputs {names} are averaged over different "
        "numbers of values in each micro-batch. One window cannot weight both "
        "exactly; micro-batches are weighted by their number of samples. "
        "`compile(micro_batch_size=..., loss_over='batch')` is exact within a "
        "batch; for other weights override `accumulation_weight` in the model.",
        stacklevel=2,
    )
    return Weight(samples)


def _without_compiled_loss(
    model: Any, accumulation: Accumulation, samples: Any
) -> Weight:
    overridden = keras_internals.overrides_compute_loss(model)
    if not overridden and added_losses.are_only_values(model):
        return Weight(1, divides=False)
    # Within a batch the share of each piece is known beforehand, which keeps
    # sums whole; not where a `compute_loss` of one's own hides them.
    if accumulation.across or overridden:
        added_losses.warn_of_values(model, accumulation.warned)
    return Weight(samples, proportional=True)


def _warn_of_coupling(
    observations: list[Observation], warned: set[str]
) -> None:
    names = [o.name for o in observations if o.kind == "batch" or o.couples]
    if not names:
        return
    messages.warn_once(
        warned,
        "one number",
        f"The loss of {', '.join(map(repr, names))} returns one number for "
        "all samples that it is given, or couples them: what it divides by "
        "cannot be seen, and a mean over micro-batches need not be the value "
        "of the large batch. Micro-batches are weighted by their number of "
        "samples, which is right for a plain mean. If the loss divides by a "
        "count of its own, return that from `accumulation_weight` in the "
        "model, or let the loss return a value per sample; for a loss that "
        "couples samples (contrastive, Dice over the batch) use "
        "`compile(micro_batch_size=..., loss_over='batch')`.",
        stacklevel=2,
    )
