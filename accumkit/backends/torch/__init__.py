"""Accumulation on torch."""
