"""Checks for other code: conformance of a sampler."""
