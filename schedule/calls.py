"""Calls of primitives, and their form in a recipe."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..base._torch import OpOverload
from ..base.errors import ScheduleError

Recipe = list[dict[str, Any]]
"""Steps as plain values, which can be written to YAML."""


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """One call of a primitive."""

    path: str
    """Path of the module it was called on; the root is the empty string."""
    primitive: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = [_short(value) for value in self.args]
        arguments += [f"{key}={_short(value)}" for key, value in self.kwargs.items()]
        return f"{self.primitive}({', '.join(arguments)})"


def to_recipe(steps: Iterable[PrimitiveCall]) -> Recipe:
    """Converts steps to mappings of `path`, `primitive` and, if given, `args` and `kwargs`, in order.

    Values are plain: numbers, strings, lists and mappings. A dtype is written `{dtype: bfloat16}`, an operator `{op:
    aten.mm.default}`, and a class or function of a module `{import: package.module:name}`.

    Raises:
        ScheduleError: a step has an argument that cannot be written as text (a lambda, a module instance).
    """
    recipe = []
    for step in steps:
        label = f"{step} on '{step.path or 'the root'}'"
        entry: dict[str, Any] = {"path": step.path, "primitive": step.primitive}
        if step.args:
            entry["args"] = [as_plain(value, label) for value in step.args]
        if step.kwargs:
            entry["kwargs"] = {key: as_plain(value, label) for key, value in step.kwargs.items()}
        recipe.append(entry)
    return recipe


def as_plain(value: Any, label: str) -> Any:
    """Converts an argument to numbers, strings, lists and mappings.

    Args:
        label: the step with this argument, for errors.

    Raises:
        ScheduleError: it cannot be written as text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, OpOverload):
        return {"op": str(value)}
    if hasattr(value, "to_recipe"):
        return value.to_recipe()
    if isinstance(value, (list, tuple, torch.Size)):
        return [as_plain(item, label) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": [[as_plain(key, label), as_plain(entry, label)] for key, entry in value.items()]}
    if callable(value) and not isinstance(value, nn.Module):
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if imported(name, missing=None) is value:  # not a local function, nor a name that was rebound
            return {"import": name}
    raise ScheduleError(
        f"recipe: {label} has an argument that cannot be written as text: {value!r}; use a function or class "
        "that can be imported by name"
    )


_REFUSE = object()


def imported(name: str, missing: Any = _REFUSE) -> Any:
    """Imports the object of `module:name`; returns `missing` if it does not exist.

    Raises:
        ScheduleError: it does not exist, and `missing` is not given.
    """
    module, _, qualified = name.partition(":")
    try:
        target: Any = import_module(module)
        for attribute in qualified.split("."):
            target = getattr(target, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        if missing is not _REFUSE:
            return missing
        raise ScheduleError(f"recipe: cannot import '{name}': {error}") from error
    return target


def _short(value: Any) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if hasattr(value, "names"):  # a handle of find, which may no longer be in its graph
        return "+".join(value.names)
    if isinstance(value, (list, tuple)) and value and all(hasattr(handle, "names") for handle in value):
        return f"[{', '.join(_short(handle) for handle in value)}]"
    rendered = repr(value)
    return rendered if len(rendered) <= 40 else rendered[:37] + "..."
