"""Schedules of model families, one per file."""

from importlib import import_module

from .generic import schedule as generic_schedule
from .standard import StandardSchedule, Support, strategies_of
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

# Model types, as transformers names them, with a schedule in the module of that name. Types with plans in transformers
# (Llama, Qwen, Mistral, Mixtral, GPT-NeoX and about a hundred more) need none.
_FILES = ("albert", "bert", "gpt2", "gpt_neo", "opt", "roberta", "t5", "vit", "wide_resnet")

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
    """Returns the schedule of a family; for those without a file the one that follows transformers' own plans."""
    name = "roberta" if model_type == "xlm-roberta" else model_type
    return import_module(f".{name}", __name__).schedule if name in _FILES else generic_schedule
