"""Where windows end: pure arithmetic on counts, without Keras."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from accumkit import checks

StepsSchedule: TypeAlias = int | Mapping[int, int] | Callable[[int], int]
"""N: a constant, `{epoch: N}`, or a function of the optimizer step."""


def optimizer_steps(
    batches_per_epoch: int,
    accumulation_steps: StepsSchedule,
    epochs: int = 1,
    remainder: str = "apply",
) -> int:
    """Returns how many optimizer steps a run of `fit` will take.

    Use it to size a learning-rate schedule, which counts optimizer steps:
    with N = `accumulation_steps` and B = `batches_per_epoch`, a run of E
    epochs takes E·⌈B/N⌉ of them under `"apply"`, ⌊E·B/N⌋ under `"carry"` and
    E·⌊B/N⌋ under `"drop"`.

    Example:

    ```python
    steps = accumkit.optimizer_steps(
        batches_per_epoch=len(dataset), accumulation_steps=8, epochs=10
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=steps)
    ```

    Args:
        batches_per_epoch: Int ≥ 0, how many batches `fit` draws in an epoch.
        accumulation_steps: Int ≥ 1, how many batches make a window. A dict
            `{epoch: N}` (from that epoch on, epochs counted from 0, epoch 0
            present) or a function `N = f(optimizer_step)` as in
            `accumkit.callbacks.AccumulationScheduler`; N is constant within
            a window.
        epochs: Int ≥ 0, the number of epochs. Defaults to `1`.
        remainder: `"apply"`, `"carry"` or `"drop"`, what becomes of a window
            still open at the end of an epoch. Defaults to `"apply"`.

    Returns:
        Int, what `optimizer.iterations` will have grown by.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If a count is too small, or `remainder` is unknown.
    """
    batches = checks.count("batches_per_epoch", batches_per_epoch, minimum=0)
    epochs = checks.count("epochs", epochs, minimum=0)
    checks.choice("remainder", remainder, checks.REMAINDERS)
    if not isinstance(accumulation_steps, Mapping) and not callable(
        accumulation_steps
    ):
        n = checks.count("accumulation_steps", accumulation_steps)
        if remainder == "carry":
            return epochs * batches // n
        full, rest = divmod(batches, n)
        return epochs * (full + (remainder == "apply" and rest > 0))
    return _steps_of_schedule(
        batches, steps_function(accumulation_steps), epochs, remainder
    )


def steps_function(
    schedule: Mapping[int, int] | Callable[[int], int],
) -> Callable[[int, int], int]:
    """Returns `f(epoch, optimizer_step) -> N` for either form of schedule.

    Args:
        schedule: A dict `{epoch: N}` or a function of the optimizer step.

    Returns:
        A function of the epoch and the optimizer step (both from 0).

    Raises:
        TypeError: If the schedule is neither, or N is not an integer.
        ValueError: If the dict has no entry for epoch 0, or an N is below 1.
    """
    if callable(schedule):
        return lambda epoch, step: checks.count(
            "accumulation_steps", schedule(step)
        )
    if not isinstance(schedule, Mapping):
        raise TypeError(
            "`accumulation_steps` must be a dict {epoch: N} or a function of "
            f"the optimizer step. Received: {schedule!r} (of type "
            f"{type(schedule).__name__}). For a constant N pass "
            "`accumulation_steps` to `compile`."
        )
    table = {
        checks.count("epoch", epoch, minimum=0): checks.count(
            "accumulation_steps", n
        )
        for epoch, n in schedule.items()
    }
    if 0 not in table:
        raise ValueError(
            "`accumulation_steps` as a dict {epoch: N} must have an entry for "
            f"epoch 0. Received: {dict(schedule)!r}. Add `0: N`."
        )
    return lambda epoch, step: table[max(e for e in table if e <= epoch)]


def _steps_of_schedule(
    batches: int,
    steps_at: Callable[[int, int], int],
    epochs: int,
    remainder: str,
) -> int:
    steps = 0
    missing = 0  # batches until the open window is full; 0: none is open
    for epoch in range(epochs):
        left = batches
        while left > 0:
            if missing == 0:
                missing = steps_at(epoch, steps)
            taken = min(left, missing)
            left -= taken
            missing -= taken
            steps += missing == 0
        if missing and remainder != "carry":
            steps += remainder == "apply"
            missing = 0
    return steps
