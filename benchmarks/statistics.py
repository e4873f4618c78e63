"""Medians, spreads and paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median, minimum and maximum of at least one value."""
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


def speedups(
    reference: Sequence[float], system: Sequence[float]
) -> list[float]:
    """How many times as fast the system was, in each round.

    Round by round: both values of a pair were measured within seconds of
    each other, so that a machine that slows down slows down both.

    Args:
        reference: Seconds per sample of the reference, one for each round.
        system: Those of the system, in the same rounds.
    """
    return [slow / fast for slow, fast in zip(reference, system, strict=True)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, beginning with another one in each turn.

    So none always comes first, when the machine is still warming up.
    """
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]
