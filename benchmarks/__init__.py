"""Speed and memory of gradient accumulation, measured against Keras's own."""
