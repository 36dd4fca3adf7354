from train_commands import here, run, start  # noqa: F401
