"""Checks for other code: numerics of a model, conformance of a sampler."""
