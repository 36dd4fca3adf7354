"""How a model is rewritten: the schedule tree and its primitives."""

from . import primitives
from .build import build
from .registry import list_primitives, register_primitive
from .schedule import Schedule, create_schedule

__all__ = [
    "Schedule",
    "build",
    "create_schedule",
    "list_primitives",
    "primitives",
    "register_primitive",
]
