"""What is tuned: workloads, any Hugging Face language model or image classifier, presets, families' schedules."""

from importlib import import_module
from typing import Any

# `workload` is a function here and a file beside it: bound after the file is imported, the function stays.
from .workload import Workload  # isort: skip
from .resolve import workload  # isort: skip

_LAZY = {
    "default_space": ".spaces",
    "flops_of": ".flops",
    "generic_schedule": ".families",
    "hugging_face": ".huggingface",
    "list_presets": ".presets",
    "make_space": ".spaces",
}

__all__ = ["Workload", "workload", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
