"""Training for real: data, checkpoints, the loop, `redline train` and `redline.accelerate`."""
