"""The primitives by name, and how one is added."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from ..errors import ScheduleError
from .schedule import PRIMITIVES, Schedule
from .steps import Step


@overload
def register_primitive(function: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def register_primitive(
    *, name: str | None = None, query: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def register_primitive(
    function: Callable[..., Any] | None = None, *, name: str | None = None, query: bool = False
) -> Any:
    """Makes `function(sch, ...)` a primitive, callable as `sch.<name>(...)`.

    The function checks its arguments before it changes anything, so that a refused call leaves the schedule
    as it was. What it returns is returned; None stands for the schedule itself, so that calls chain.

    Args:
        function: first parameter is the `Schedule` it is called on. Its signature and docstring are those of
            the method.
        name: the primitive's name; the function's name by default.
        query: it only looks, so that it is not recorded and may be called after `build`.

    Raises:
        ScheduleError: the name is taken.
    """
    if function is None:
        return functools.partial(_register, name=name, query=query)
    return _register(function, name=name, query=query)


def list_primitives(name_only: bool = False) -> list[str] | dict[str, Callable[..., Any]]:
    """The registered primitives in alphabetical order: name -> function, or only the names."""
    names = sorted(PRIMITIVES)
    return names if name_only else {each: PRIMITIVES[each] for each in names}


def _register(function: Callable[..., Any], *, name: str | None, query: bool) -> Callable[..., Any]:
    label = name or function.__name__
    if label in PRIMITIVES or hasattr(Schedule, label):
        raise ScheduleError(f"a primitive's name must be new, but '{label}' is taken; register another name")
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise ScheduleError(f"primitive '{label}' must take the schedule first, but takes no parameter")

    @functools.wraps(function)
    def primitive(sch: Schedule, *args: Any, **kwargs: Any) -> Any:
        if not query and sch.tree.built:
            raise ScheduleError(
                f"{label} on '{sch.name}': a primitive must come before build, but this schedule is built; "
                "create a schedule of a fresh model"
            )
        result = function(sch, *args, **kwargs)
        if not query:
            sch.tree.steps.append(Step(sch.path, label, args, kwargs))
        return sch if result is None else result

    primitive.__name__ = label
    primitive.__qualname__ = f"Schedule.{label}"
    PRIMITIVES[label] = function
    setattr(Schedule, label, primitive)
    return function
