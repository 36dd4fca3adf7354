"""What is tuned: workloads, any Hugging Face language model or image classifier, presets, families' schedules."""

import lazy_loader

# `workload` is a function here and a file beside it: bound after the file is imported, the function stays.
from .workload import Workload  # isort: skip
from .resolve import workload  # isort: skip

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
