"""The schedule tree and the primitives that rewrite a model."""

from . import collectives
from .build import build
from .graph.pattern import call_module
from .parallel.sharding import full_state_dict, load_full_state_dict
from .random_state import seed_ranks
from .schedule import Schedule, create_schedule, list_primitives, register_primitive
from .verify import verify

__all__ = [
    "Schedule",
    "build",
    "call_module",
    "collectives",
    "create_schedule",
    "full_state_dict",
    "list_primitives",
    "load_full_state_dict",
    "register_primitive",
    "seed_ranks",
    "verify",
]
