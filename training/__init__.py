"""How a workload is trained in one configuration: mesh, precision, passes, and what it computes."""

from importlib import import_module
from typing import Any

_LAZY = {"Training": ".training"}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
