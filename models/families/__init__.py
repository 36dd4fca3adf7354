"""Schedules of model families, one per file."""

from importlib import import_module

from .generic import schedule as generic_schedule
from .standard import StandardSchedule, Support, strategies_of
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

# Maps model types, as transformers names them, to the module with their schedule. Types with plans in transformers
# (Llama, Qwen, Mistral, Mixtral, GPT-NeoX and about a hundred more) need none.
_FILES = {
    "albert": "albert",
    "bert": "bert",
    "gpt2": "gpt2",
    "gpt_neo": "gpt_neo",
    "opt": "opt",
    "roberta": "roberta",
    "t5": "t5",
    "vit": "vit",
    "wide_resnet": "wide_resnet",
    "xlm-roberta": "roberta",
}

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
    if model_type not in _FILES:
        return generic_schedule
    return import_module(f".{_FILES[model_type]}", __name__).schedule
