"""Accumulation on TensorFlow."""
