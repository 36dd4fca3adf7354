"""redline finds the fastest way to train a model on the hardware you have.

Public names are resolved on first use, so `import redline` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "redline.space",
    "Space": "redline.space",
    "Schedule": "redline.schedule",
    "build": "redline.schedule",
    "create_schedule": "redline.schedule",
    "deferred": "redline.schedule",
    "verify": "redline.schedule",
    "list_primitives": "redline.schedule",
    "register_primitive": "redline.schedule",
    "Workload": "redline.models",
    "workload": "redline.models",
    "Estimate": "redline.estimator",
    "Estimator": "redline.estimator",
    "Hardware": "redline.estimator",
    "ModelFacts": "redline.estimator",
    "TrainingSetup": "redline.estimator",
    "Measurement": "redline.results",
    "Status": "redline.results",
    "Trial": "redline.results",
    "Result": "redline.tuner",
    "tune": "redline.tuner",
    "Sampler": "redline.tuner",
    "MissingDependency": "redline.errors",
    "NothingFound": "redline.errors",
    "OutOfMemory": "redline.errors",
    "RedlineError": "redline.errors",
    "RunnerError": "redline.errors",
    "ScheduleError": "redline.errors",
    "SpaceError": "redline.errors",
    "StudyError": "redline.errors",
    "TraceError": "redline.errors",
    "UsageError": "redline.errors",
    "WorkloadError": "redline.errors",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
