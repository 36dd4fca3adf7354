"""What a configuration means: formats, sharding, pipeline schedules, sequence shards, standard and lossy values."""
