from kept_agent import kept_agent, one_agent  # noqa: F401
from train_commands import here, run, start  # noqa: F401
