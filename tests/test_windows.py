"""The pure arithmetic of windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumkit import optimizer_steps


@given(
    batches=st.integers(0, 40),
    n=st.integers(1, 12),
    epochs=st.integers(0, 6),
    remainder=st.sampled_from(["apply", "carry", "drop"]),
)
def test_against_counting(batches, n, epochs, remainder):
    steps = opened = 0
    for _ in range(epochs):
        for _ in range(batches):
            opened += 1
            if opened == n:
                steps, opened = steps + 1, 0
        if opened and remainder != "carry":
            steps += remainder == "apply"
            opened = 0
    assert optimizer_steps(batches, n, epochs, remainder) == steps
    # A schedule that stays constant is the constant.
    for schedule in ({0: n}, lambda step: n):
        assert optimizer_steps(batches, schedule, epochs, remainder) == steps


@pytest.mark.parametrize(
    ("schedule", "remainder", "expected"),
    [
        ({0: 1, 2: 4}, "apply", 10 + 10 + 3),
        ({0: 1, 2: 4}, "drop", 10 + 10 + 2),
        ({0: 4, 1: 1}, "carry", 2 + 1 + 8 + 10),
        (lambda step: step + 1, "carry", 7),
    ],
)
def test_schedules(schedule, remainder, expected):
    assert optimizer_steps(10, schedule, 3, remainder) == expected


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((-1, 2), ValueError, "`batches_per_epoch`"),
        ((1.5, 2), TypeError, "`batches_per_epoch`"),
        ((4, 0), ValueError, "`accumulation_steps`"),
        ((4, {1: 2}), ValueError, "entry for epoch 0"),
        ((4, {0: 0}), ValueError, "`accumulation_steps`"),
        ((4, lambda step: 0.5), TypeError, "`accumulation_steps`"),
        ((4, 2, -1), ValueError, "`epochs`"),
        ((4, 2, 1, "flush"), ValueError, "`remainder`"),
    ],
)
def test_errors(args, error, match):
    with pytest.raises(error, match=match):
        optimizer_steps(*args)
