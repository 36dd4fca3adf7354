"""Checks that other code can inherit or call: numerics of a model, checkpoints across strategies, promises of a sampler."""
