"""Whether the accumulated run is the large batch."""

from __future__ import annotations

from typing import NamedTuple

from accumkit.proof.runs import Proof

# Rounding of different sums differs by chance, seldom by more than twice.
LIMIT = 10
# Weights are float32: no training is expected to be nearer than this.
FLOOR = 1e-6
# Beyond this share of the way, rounding hides what is to be seen.
BLURRED = 1e-3
# The first epoch shows the windows and the remainder, the second what the
# first left behind. Later, training magnifies rounding, and by chance.
JUDGED_EPOCHS = 2


class Verdict(NamedTuple):
    """Whether the accumulated run is the large batch.

    Attributes:
        equal: Whether they differ by no more than rounding.
        sentence: The reason.
    """

    equal: bool
    sentence: str


def judge(proof: Proof) -> Verdict:
    """Compares the accumulated run with the large batch.

    The yardstick is measured: how far the large batch gets from itself when
    the samples of each batch are summed in reverse order. After each of the
    first two epochs the accumulated run must be at most ten times as far, or
    within 1e-5 of the way that the large batch went.

    Args:
        proof: The runs.

    Returns:
        The verdict. It is negative, too, where rounding alone went so far
        that nothing can be seen.
    """
    pairs = zip(
        proof.distances(proof.accumulated),
        proof.distances(proof.reordered),
        strict=True,
    )
    worst = 0.0
    for epoch, (ours, rounding) in enumerate(list(pairs)[:JUDGED_EPOCHS], 1):
        # Written so that NaN, after a divergence, passes neither.
        if not rounding <= BLURRED:
            return Verdict(
                False,
                "nothing can be told: rounding alone carries the large batch "
                f"{rounding:.1e} of its way off by epoch {epoch}. Lower "
                "--learning-rate or --samples.",
            )
        ratio = ours / max(rounding, FLOOR)
        if not ratio <= LIMIT:
            return Verdict(
                False,
                "the accumulated run is not the large batch: after epoch "
                f"{epoch} its weights are {ours:.1e} of the way off, rounding "
                f"alone makes {rounding:.1e} (limit {LIMIT} times that or "
                f"{LIMIT * FLOOR:.0e}).",
            )
        worst = max(worst, ours)
    epochs = min(len(proof.large.rows), JUDGED_EPOCHS)
    return Verdict(
        True,
        "The accumulated run is the large batch, to rounding: within "
        f"{worst:.1e} over the first {epochs} epoch(s), where the limit is "
        f"{LIMIT} times what rounding alone makes, or {LIMIT * FLOOR:.0e}.",
    )
