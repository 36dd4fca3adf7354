"""Schedules of model families."""

from .schedules import generic_schedule, schedule_of
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
