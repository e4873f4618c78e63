"""The proof on real data that `python -m accumkit` runs."""

WAYS = ("mixin", "optimizer")
"""What can accumulate."""
