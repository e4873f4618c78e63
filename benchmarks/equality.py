"""Whether a system ends with the weights of the large batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOLERANCE = 2e-5
"""Largest difference that passes, as a share of the weights' own movement.

Adding float32 gradients in another order changes them by some 1e-7 to 1e-6,
and the weights, some thousand times larger than their movement in a few
steps, are rounded at 6e-8 of themselves. A window divided wrongly, or one
micro-batch left out, differs by more than 1e-2.
"""


@dataclass(frozen=True)
class Agreement:
    """What a comparison with the large batch found.

    Attributes:
        difference: Norm of the difference of the two ends, divided by the
            norm of the large batch's movement.
        movement: That norm, divided by the norm of the weights.
        same_start: Whether both began with the same weights, to the bit.
    """

    difference: float
    movement: float
    same_start: bool

    @property
    def holds(self) -> bool:
        """Whether the system did the large batch's work."""
        return (
            self.same_start
            and self.movement > 0
            and self.difference <= TOLERANCE
        )


def agreement(
    before: list[np.ndarray],
    after: list[np.ndarray],
    expected: list[np.ndarray],
    same_start: bool = True,
) -> Agreement:
    """Compare the weights of a system with those of the large batch.

    Args:
        before: The weights that both started from.
        after: The system's weights.
        expected: The large batch's weights.
        same_start: Whether both did start from ``before``.
    """
    movement = _norm(expected, before)
    start = _norm(before, [np.zeros(1)] * len(before))
    return Agreement(
        difference=_norm(after, expected) / movement if movement else np.inf,
        movement=movement / start,
        same_start=same_start,
    )


def stored(path: Path, when: str) -> list[np.ndarray]:
    """The weights ``before`` or ``after``, as a worker has stored them."""
    with np.load(path) as file:
        count = len(file.files) // 2
        return [file[f"{when}_{index}"] for index in range(count)]


def _norm(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=True):
        total += float(np.sum((a.astype("float64") - b) ** 2))
    return total**0.5
