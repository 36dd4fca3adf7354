"""Meaning of configurations: formats, sharding, pipeline schedules, sequence shards, standard and lossy values."""
