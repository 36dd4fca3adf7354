"""Memory and time of any configuration on any cluster, predicted without a device."""

from importlib import import_module
from typing import Any

_LAZY = {
    "Constants": ".constants",
    "DEVICES": ".hardware",
    "Estimator": ".estimator",
    "Hardware": ".hardware",
    "Link": ".hardware",
    "find_hardware": ".hardware",
    "Estimate": ".estimate",
    "EstimateTable": ".estimate",
    "Attention": ".model_facts",
    "FactsSource": ".model_facts",
    "Matmul": ".model_facts",
    "ModelFacts": ".model_facts",
    "Part": ".model_facts",
    "PerToken": ".model_facts",
    "Shape": ".model_facts",
    "TrainingSetup": ".setup",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
