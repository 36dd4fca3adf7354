"""Workloads: any Hugging Face model of a supported task, presets, schedules of families."""

import lazy_loader

# `workload` is both a function and a module: bound after the module is imported, the function remains.
from .workload import Workload  # isort: skip
from .resolve import workload  # isort: skip

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
