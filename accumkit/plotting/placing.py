"""Which epochs of a run the values of a metric belong to."""

from collections.abc import Sequence


def rows_of(
    name: str,
    count: int,
    epochs: list[int],
    validation_freq: int | Sequence[int] | None,
) -> list[int]:
    """Returns the epochs that the values of a metric belong to.

    Args:
        name: Its name.
        count: How many values it has.
        epochs: The run's epochs, counted from 0.
        validation_freq: What `fit` was given under this name, or None.

    Raises:
        ValueError: If they can't be assigned to epochs.
    """
    if name.startswith("val_"):
        return _validated(name, count, epochs, validation_freq)
    if count == len(epochs):
        return epochs
    raise ValueError(
        "`history` must hold one value of each metric for every "
        f"epoch. Received: {count} values of {name!r} for "
        f"{len(epochs)} epochs. If one History was passed to several "
        "`fit` calls, or a callback logs in some epochs only, use "
        "`keras.callbacks.CSVLogger` and pass its file."
    )


def _validated(
    name: str,
    count: int,
    epochs: list[int],
    validation_freq: int | Sequence[int] | None,
) -> list[int]:
    """The epochs that the `count` values of a validation metric belong to."""
    if validation_freq is None:
        if count == len(epochs):
            return epochs
        fitting = {}
        for every in range(1, max(epochs, default=0) + 2):
            rows = _every(every, epochs)
            if len(rows) == count:
                fitting.setdefault(tuple(rows), every)
        if len(fitting) == 1:
            return list(*fitting)
        several = ", ".join(map(str, fitting.values())) or "no whole number"
        raise ValueError(
            "`validation_freq` must be given where validation did not run in "
            "every epoch and not exactly one whole number fits, since Keras "
            "does not record when it ran. Received: validation_freq=None with "
            f"{count} values of {name!r} for {len(epochs)} epochs, which "
            f"{several} would fit. Call `history_frame(history, "
            "validation_freq=...)` with what `fit` was given; the plotting "
            "functions accept the frame."
        )
    if isinstance(validation_freq, int):
        rows = _every(validation_freq, epochs)
    else:
        rows = [e for e in epochs if e + 1 in validation_freq]
    if count != len(rows):
        raise ValueError(
            "`validation_freq` must be what `fit` was given. Received: "
            f"validation_freq={validation_freq!r}, which validates in "
            f"{len(rows)} of the epochs {epochs}, with {count} values of "
            f"{name!r}."
        )
    return rows


def _every(number: int, epochs: list[int]) -> list[int]:
    return [epoch for epoch in epochs if (epoch + 1) % number == 0]
