"""Makes a function a primitive: its call is refused after `build`, recorded as a step, and can be chained."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..base.errors import ScheduleError
from .tree import PrimitiveCall, ScheduledModule

Extra = ParamSpec("Extra")
"""Arguments of a primitive in addition to the schedule."""
Self = TypeVar("Self", bound=ScheduledModule)


def primitive(
    function: Callable[Concatenate[Any, Extra], Any], name: str | None = None
) -> Callable[Concatenate[Self, Extra], Self]:
    """Converts a function to a method of a schedule, with its signature and docstring.

    It checks its arguments before it changes anything, so that a refused call does not change the schedule. Its result
    is returned; None becomes the schedule itself, so that calls can be chained.

    Args:
        function: first parameter is the schedule that it is called on.
        name: the method's name; the function's name by default.
    """
    label = name or function.__name__

    @functools.wraps(function)
    def method(sch: Self, *args: Extra.args, **kwargs: Extra.kwargs) -> Self:
        if sch.tree.built:
            raise ScheduleError(
                f"{label} on '{sch.name}': a primitive must come before build, but this schedule is built; "
                "create a schedule of a fresh model"
            )
        result = function(sch, *args, **kwargs)
        # After the call: a refused call is not a step.
        sch.tree.steps.append(PrimitiveCall(sch.path, label, args, kwargs))
        return sch if result is None else result

    method.__name__, method.__qualname__ = label, f"Schedule.{label}"
    return method
