"""Schedules of model families."""

from .generic import schedule as generic_schedule
from .named import SCHEDULES
from .standard import StandardSchedule, Support, strategies_of
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

__all__ = [
    "Cuts",
    "Regions",
    "StandardSchedule",
    "Support",
    "column_parallel",
    "generic_schedule",
    "row_parallel",
    "schedule_of",
    "strategies_of",
]


def schedule_of(model_type: str) -> StandardSchedule:
    """Returns the schedule of a family; for those without one of their own the one that follows transformers' plans."""
    return SCHEDULES.get(model_type, generic_schedule)
