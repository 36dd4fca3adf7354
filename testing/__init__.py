"""Checks for other code: numerics of a model, checkpoints across strategies, conformance of a sampler."""
