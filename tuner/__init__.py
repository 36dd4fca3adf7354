"""How the next candidate is chosen: samplers, budget, the search loop, and `redline.tune`."""

from importlib import import_module
from typing import Any

_LAZY = {
    "Budget": ".budget",
    "Result": ".result",
    "Sampler": ".samplers",
    "SearchListener": ".listener",
    "make_sampler": ".samplers",
    "sampler_names": ".samplers",
    "tune": ".tuning",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
