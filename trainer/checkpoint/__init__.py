"""Checkpoints of a training, which any other configuration can continue from."""
