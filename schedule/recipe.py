"""Replays a recipe: the steps of a schedule as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import ScheduleError, unknown
from .calls import imported
from .graph.subgraph import from_recipe
from .schedule import Schedule, list_primitives


def apply_recipe(sch: Schedule, recipe: Sequence[Mapping[str, Any]]) -> Schedule:
    """Replays the steps of a recipe on the schedule of a fresh copy of the model.

    A recipe is code: it names functions to be imported and called. Replay only recipes that you trust.

    Raises:
        ScheduleError: not a recipe; an unknown primitive or path; or a primitive refuses a step, named by its number.
    """
    if isinstance(recipe, (str, Mapping)) or not isinstance(recipe, Sequence):
        raise ScheduleError(f"a recipe must be a list of steps, but got {type(recipe).__name__}")
    for number, step in enumerate(recipe):
        if not isinstance(step, Mapping) or not {"path", "primitive"} <= set(step) <= _KEYS:
            raise ScheduleError(
                f"step {number} of the recipe must have path and primitive, and may have args and kwargs, "
                f"but is {step!r}"
            )
        names = list_primitives(name_only=True)
        if step["primitive"] not in names:
            raise ScheduleError(f"step {number}: {unknown('primitive', step['primitive'], names)}")
        target = sch[step["path"]] if step["path"] else sch
        args = [_value(plain, target) for plain in step.get("args", ())]
        kwargs = {key: _value(value, target) for key, value in step.get("kwargs", {}).items()}
        try:
            getattr(target, step["primitive"])(*args, **kwargs)
        except (ScheduleError, TypeError) as error:
            raise ScheduleError(f"step {number}: {error}") from error
    return sch


_KEYS = {"path", "primitive", "args", "kwargs"}


def _value(plain: Any, sch: Schedule) -> Any:
    if isinstance(plain, list):
        return [_value(item, sch) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    if set(plain) == {"dtype"}:
        dtype = getattr(torch, str(plain["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ScheduleError(f"recipe: unknown dtype '{plain['dtype']}'")
        return dtype
    if set(plain) == {"op"}:
        operator: Any = torch.ops
        for attribute in str(plain["op"]).split("."):
            operator = getattr(operator, attribute)
        return operator
    if set(plain) == {"import"}:
        return imported(plain["import"])
    if set(plain) == {"mapping"}:
        return {_value(key, sch): _value(value, sch) for key, value in plain["mapping"]}
    if {"find", "at", "nodes"} <= set(plain) <= {"find", "at", "nodes", "where"}:
        return from_recipe(sch, plain, _value)
    raise ScheduleError(f"recipe: an argument must be a plain value, but is {dict(plain)!r}")
