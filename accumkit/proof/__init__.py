"""The proof on real data that `python -m accumkit` runs."""
