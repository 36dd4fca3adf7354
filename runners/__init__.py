"""How a candidate is tried: dry runs in fresh processes, on this machine or where Ray places them."""

from importlib import import_module
from typing import Any

from .runner import Reference, Runner, TrialRequest

_LAZY = {
    "FunctionRunner": ".function",
    "LocalRunner": ".local",
    "RayRunner": ".ray_runner",
    "TimingPlan": ".timing",
    "TrialTerms": ".work",
}

__all__ = ["Reference", "Runner", "TrialRequest", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
