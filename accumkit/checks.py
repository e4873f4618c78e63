"""What arguments may be, and the errors for those that may not."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

REMAINDERS = ("apply", "carry", "drop")
WEIGHTINGS = ("exact", "uniform")
LOSS_OVER = ("micro_batch", "batch")


def count(name: str, value: Any, minimum: int = 1) -> int:
    """Returns `value` as an int, or raises.

    Args:
        name: The argument's name, for the message.
        value: An integer of any kind (NumPy's included), no bool.
        minimum: The smallest value allowed. Defaults to `1`.

    Returns:
        The value as a Python int.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is below `minimum`.
    """
    rule = f"`{name}` must be an integer >= {minimum}."
    received = f"Received: {name}={value!r} (of type {type(value).__name__})."
    try:
        # NumPy's too, by either of its names: before NumPy 2 it was an index.
        if type(value).__name__ in ("bool", "bool_"):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        hint = "Pass a whole number, such as 4."
        raise TypeError(f"{rule} {received} {hint}") from None
    if number < minimum:
        raise ValueError(f"{rule} {received} Pass {minimum} or more.")
    return number


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Returns `value` if it is one of `allowed`, or raises.

    Raises:
        ValueError: If it is not.
    """
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        raise ValueError(
            f"`{name}` must be one of {names}. Received: {name}={value!r}. "
            f"Leave it out for {allowed[0]!r}."
        )
    return value


def loss_over(value: Any, micro_batch_size: int | None) -> None:
    """Raises if there is nothing that the loss could be over.

    Args:
        value: What the loss is to see.
        micro_batch_size: Samples in a piece of a batch, or None.

    Raises:
        ValueError: If it is unknown, or batches are not cut into pieces.
    """
    choice("loss_over", value, LOSS_OVER)
    if value == "batch" and micro_batch_size is None:
        raise ValueError(
            "`loss_over='batch'` needs `micro_batch_size`: it has the loss see "
            "the outputs of all the pieces of a batch, and without "
            "`micro_batch_size` a batch is not cut. Received: loss_over="
            "'batch' and micro_batch_size=None. Pass `micro_batch_size=m`, "
            "the samples that fit into memory, and the large batch as "
            "`batch_size` of `fit`."
        )


def nested_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and all those that it wraps.

    Args:
        optimizer: A Keras optimizer; `LossScaleOptimizer` and others keep
            what they wrap in `inner_optimizer`, `MultiOptimizer` in
            `optimizers`.
    """
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield from nested_optimizers(inner)
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, (list, tuple)):
        for one in several:
            yield from nested_optimizers(one)


def builtin_steps(optimizer: Any) -> int:
    """Returns N of Keras's own accumulation, 1 if it is not used.

    Args:
        optimizer: The optimizer of a plain Keras model.
    """
    for inner in nested_optimizers(optimizer):
        steps = getattr(inner, "gradient_accumulation_steps", None)
        if steps:
            return int(steps)
    return 1


def accumulates_alone(optimizer: Any, setting: str, value: Any) -> None:
    """Raises if the optimizer, or one inside it, accumulates on its own.

    Args:
        optimizer: The optimizer given to `compile`.
        setting: Our setting that would be stacked on top, for the message.
        value: Its value.

    Raises:
        ValueError: If there would be two accumulations, one in the other.
    """
    for inner in nested_optimizers(optimizer):
        own = getattr(inner, "gradient_accumulation_steps", None)
        name = "gradient_accumulation_steps"
        if own is None:
            own = getattr(inner, "accumulation_steps", None)
            name = "accumulation_steps"
        if own is not None and own > 1:
            raise ValueError(
                f"`{setting}` must not be combined with an optimizer that "
                "accumulates gradients itself: the two would multiply. "
                f"Received: {setting}={value} and an optimizer "
                f"{type(inner).__name__}({name}={own}). Remove `{name}` from "
                f"the optimizer, or leave out `{setting}`."
            )


def cannot_be_cut(received: str) -> str:
    """The message for a batch that cannot be cut into pieces.

    Args:
        received: What was received.
    """
    return (
        "`micro_batch_size` needs inputs, targets and sample weights that all "
        "have the batch as their first axis, to cut them into pieces. "
        f"Received: {received}. Repeat a value without batch axis for each "
        "sample, or use `accumulation_steps` with smaller batches."
    )


def rows_to_cut(shapes: list[tuple[Any, ...]]) -> None:
    """Raises if arrays cannot be cut into pieces along a common first axis.

    Args:
        shapes: Of inputs, targets and sample weights; None where a length is
            not known yet.

    Raises:
        ValueError: If one has no axis, or another length than the rest.
    """
    lengths = {shape[0] for shape in shapes if shape} - {None}
    if not all(shapes) or len(lengths) > 1:
        raise ValueError(cannot_be_cut(f"shapes {shapes}"))


def gradients_have_means(setting: str, variables: Iterable[Any]) -> None:
    """Raises for variables that are overwritten with their gradients.

    Args:
        setting: What asks for accumulation, for the message.
        variables: What is to be trained.

    Raises:
        ValueError: If there are any, as in float8 layers.
    """
    if any(getattr(v, "overwrite_with_gradient", False) for v in variables):
        raise ValueError(
            f"{setting} must not be used with variables that are overwritten "
            "with their gradients, as those of float8 layers are: such a "
            "gradient has no mean. Received: a model with float8 layers. "
            "Train them without accumulation."
        )


def one_reduction(losses: Iterable[Any]) -> None:
    """Raises if some outputs' losses are summed and others averaged.

    Args:
        losses: What `compile` was given, flat: names, functions, `Loss`
            objects, None.

    Raises:
        ValueError: If they do not go together in one window.
    """
    reductions = [
        getattr(loss, "reduction", "sum_over_batch_size") or "none"
        for loss in losses
        if loss is not None
    ]
    summed = [r in ("sum", "none") for r in reductions]
    if any(summed) and not all(summed):
        raise ValueError(
            "`loss` must not mix `reduction='sum'` and others under "
            "`weighting='exact'`: the former's gradients add up over a "
            "window, the latter's are averaged. Received: losses with the "
            f"reductions {reductions}. Use one reduction for all outputs (and "
            "`loss_weights` to balance them), or `weighting='uniform'`."
        )
