"""A schedule as data: the steps that led to it, as plain values that YAML keeps, and their replay."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..errors import ScheduleError, unknown
from .registry import PRIMITIVES
from .schedule import Schedule
from .subgraph import from_recipe

Recipe = list[dict[str, Any]]


def to_recipe(sch: Schedule) -> Recipe:
    """The steps of a schedule in order, mappings of `path`, `primitive` and, where given, `args`, `kwargs`.

    Values are plain: numbers, strings, lists and mappings. A dtype is written `{dtype: bfloat16}`, an
    operator `{op: aten.mm.default}`, and a class or function of a module `{import: package.module:name}`.

    Raises:
        ScheduleError: a step has an argument that text cannot stand for (a lambda, a module instance).
    """
    out = []
    for step in sch.tree.steps:
        label = f"{step} on '{step.path or 'the root'}'"
        entry: dict[str, Any] = {"path": step.path, "primitive": step.primitive}
        if step.args:
            entry["args"] = [_plain(each, label) for each in step.args]
        if step.kwargs:
            entry["kwargs"] = {key: _plain(value, label) for key, value in step.kwargs.items()}
        out.append(entry)
    return out


def apply_recipe(sch: Schedule, recipe: Sequence[Mapping[str, Any]]) -> Schedule:
    """Replays the steps of a recipe on the schedule of a fresh copy of the model.

    A recipe is code: it names functions to be imported and called. Replay only those that you trust.

    Raises:
        ScheduleError: not a recipe; an unknown primitive or path; a step is refused, with its number.
    """
    if isinstance(recipe, (str, Mapping)) or not isinstance(recipe, Sequence):
        raise ScheduleError(f"a recipe must be a list of steps, but got {type(recipe).__name__}")
    for number, step in enumerate(recipe):
        if not isinstance(step, Mapping) or not {"path", "primitive"} <= set(step) <= _KEYS:
            raise ScheduleError(
                f"step {number} of the recipe must have path and primitive, and may have args and kwargs, "
                f"but is {step!r}"
            )
        if step["primitive"] not in PRIMITIVES:
            raise ScheduleError(f"step {number}: {unknown('primitive', step['primitive'], PRIMITIVES)}")
        at = sch[step["path"]] if step["path"] else sch
        args = [_value(each, at) for each in step.get("args", ())]
        kwargs = {key: _value(value, at) for key, value in step.get("kwargs", {}).items()}
        try:
            getattr(at, step["primitive"])(*args, **kwargs)
        except (ScheduleError, TypeError) as error:
            raise ScheduleError(f"step {number}: {error}") from error
    return sch


_KEYS = {"path", "primitive", "args", "kwargs"}


def _plain(value: Any, label: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch._ops.OpOverload):
        return {"op": str(value)}
    if hasattr(value, "to_recipe"):
        return value.to_recipe()
    if isinstance(value, (list, tuple, torch.Size)):
        return [_plain(each, label) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": [[_plain(k, label), _plain(v, label)] for k, v in value.items()]}
    if callable(value) and not isinstance(value, nn.Module):
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if _imported(name, missing=None) is value:
            return {"import": name}
    raise ScheduleError(
        f"recipe: {label} has an argument that text cannot stand for: {value!r}; use a function or class "
        "that can be imported by name"
    )


def _value(plain: Any, at: Schedule) -> Any:
    if isinstance(plain, list):
        return [_value(each, at) for each in plain]
    if not isinstance(plain, Mapping):
        return plain
    if set(plain) == {"dtype"}:
        found = getattr(torch, str(plain["dtype"]), None)
        if not isinstance(found, torch.dtype):
            raise ScheduleError(f"recipe: unknown dtype '{plain['dtype']}'")
        return found
    if set(plain) == {"op"}:
        found = torch.ops
        for part in str(plain["op"]).split("."):
            found = getattr(found, part)
        return found
    if set(plain) == {"import"}:
        return _imported(plain["import"])
    if set(plain) == {"mapping"}:
        return {_value(key, at): _value(value, at) for key, value in plain["mapping"]}
    if set(plain) == {"find", "at", "nodes"}:
        return from_recipe(at, plain, _value)
    raise ScheduleError(f"recipe: an argument must be a plain value, but is {dict(plain)!r}")


_REFUSE = object()


def _imported(name: str, missing: Any = _REFUSE) -> Any:
    module, _, qualified = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        if missing is not _REFUSE:
            return missing
        raise ScheduleError(f"recipe: cannot import '{name}': {error}") from error
    return found
