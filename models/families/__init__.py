"""How a family of models is rewritten: one schedule a file."""

from importlib import import_module

from .generic import schedule as generic_schedule
from .standard import StandardSchedule, Support, spread

# Model types, as transformers names them, to the module with their schedule.
_FILES = {
    "bert": "bert",
    "gpt2": "gpt2",
    "gpt_neo": "gpt_neo",
    "llama": "llama",
    "mistral": "llama",
    "opt": "opt",
    "qwen2": "llama",
    "qwen3": "llama",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
}

__all__ = ["StandardSchedule", "Support", "generic_schedule", "schedule_of", "spread"]


def schedule_of(model_type: str) -> StandardSchedule:
    """The schedule of a family; the generic one for families without a file."""
    if model_type not in _FILES:
        return generic_schedule
    return import_module(f".{_FILES[model_type]}", __name__).schedule
