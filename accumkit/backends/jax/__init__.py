"""Accumulation on JAX."""
