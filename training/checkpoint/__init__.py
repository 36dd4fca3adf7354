"""Checkpoints of a training, which any other configuration can go on from."""
