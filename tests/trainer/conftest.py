from small_models import cpu, cuda, folder, small  # noqa: F401
from train_commands import here, run, start  # noqa: F401
