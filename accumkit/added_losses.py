"""Losses that layers add (`add_loss`), and penalties on the weights.

Keras adds them to the compiled loss, each summed over its values. What they
are to a window their shape says: a scalar is taken for a mean over the
micro-batch's samples, as Keras's activity regularizers are; a tensor of values
(CTC in a layer, say) is a sum over its samples. A penalty on the weights is
neither; it counts once, whatever the batch.
"""

from typing import Any

from keras import ops

from accumkit import keras_internals, messages


def summed_values(model: Any) -> Any:
    """The sum of the values that layers added, as Keras adds it up.

    Args:
        model: The model, after its loss was computed.

    Returns:
        A scalar tensor; None where there are none, or where a `compute_loss`
        of the model's own hides what became of them.
    """
    if keras_internals.overrides_compute_loss(model):
        return None
    values, _, _ = _split(model)
    return _total(model, values) if values else None


def once_per_window(model: Any, loss: Any, is_first: Any) -> Any:
    """Takes penalties out of all micro-batches of a window but the first.

    Where nothing is divided, a penalty on the weights would be counted once
    per micro-batch. The weights do not change within a window, so it is kept
    in the first one only.

    Args:
        model: The model, after `loss` was computed.
        loss: Scalar tensor (or values to be summed), the micro-batch's loss.
        is_first: Bool or scalar bool tensor, whether it opens the window.

    Returns:
        `loss` itself, unless there is something to take out.
    """
    _, means, penalties = _split(model)
    if not means and not penalties:
        return loss
    rest = loss - _total(model, [*means, *penalties])
    if isinstance(is_first, bool):
        return loss if is_first else rest
    return ops.where(is_first, loss, rest)


def are_only_values(model: Any) -> bool:
    """Whether values to be summed are all that layers added."""
    values, means, _ = _split(model)
    return bool(values) and not means


def warn_of_means(model: Any, over: str, warned: set[str]) -> None:
    """Warns of added means beside a loss that does not count samples.

    Args:
        model: The model, after its loss was computed.
        over: What the compiled loss counts.
        warned: Keys of the warnings given so far.
    """
    if not _split(model)[1]:
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


def warn_of_values(model: Any, warned: set[str]) -> None:
    """Warns of added values, which Keras sums, beside a mean.

    Args:
        model: The model, after its loss was computed.
        warned: Keys of the warnings given so far.
    """
    if not _split(model)[0]:
        return
    messages.warn_once(
        warned,
        "added values",
        "A layer of the model adds a loss with a value per sample "
        "(`add_loss`), which Keras sums over the batch, to losses that are "
        "averaged. One window cannot weight both exactly; the averages are "
        "exact, the sum comes out smaller than with the large batch. Add the "
        "mean in its place: `self.add_loss(n * ops.mean(values))`, with n the "
        "samples of the effective batch, is the large batch exactly.",
        stacklevel=2,
    )


def _split(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Added values to be summed, added means, penalties on the weights."""
    added, penalties = keras_internals.added_losses(model)
    values = [loss for loss in added if len(loss.shape)]
    means = [loss for loss in added if not len(loss.shape)]
    return values, means, penalties


def _total(model: Any, losses: list[Any]) -> Any:
    return sum(keras_internals.added_loss(model, loss) for loss in losses)
