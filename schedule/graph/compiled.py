"""How a fused function is compiled."""

from collections.abc import Callable
from typing import Any

import torch

from ...base.errors import ScheduleError

COMPILERS = ("inductor", "none")
"""The compilers that are known by name."""


def compiled(function: Callable[..., Any], compiler: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function as the compiler returns it: `inductor`, `none`, or a function of a function."""
    if compiler == "none":
        return function
    if isinstance(compiler, str):
        return torch.compile(function)
    made = compiler(function)
    if not callable(made):
        raise ScheduleError(f"fuse: the compiler must return a callable, but returned {type(made).__name__}")
    return made
