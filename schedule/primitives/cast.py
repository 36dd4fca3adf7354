"""cast: keep a module's weights and compute in another number format."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base._torch import buffers_of, parameters_of, tree_map, unsaved_buffers_of
from ...base.errors import ScheduleError
from ..forward import Layer, add_layer
from ..graph.called import check_called
from ..primitive import primitive
from ..tree import ScheduledModule, find_module


@primitive
def cast(sch: ScheduledModule, dtype: torch.dtype) -> None:
    """Turns this module's floating parameters and saved buffers, and what it is given, to `dtype`.

    Below the root, what the module returns goes back to the format it was given, so that its surroundings
    notice nothing. Buffers that are not part of `state_dict` (rotary frequencies) keep their precision.
    A weight tied to one outside of this module is cast for both.

    Raises:
        ScheduleError: not a floating-point format, or cast already.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ScheduleError(f"cast on '{sch.name}': dtype must be a floating-point torch.dtype, but got {dtype!r}")
    if dtype.itemsize < 2:
        raise ScheduleError(f"cast on '{sch.name}': {dtype} has no arithmetic in PyTorch; cast to bfloat16 or float16")
    if sch.deferred(_apply):
        raise ScheduleError(f"cast on '{sch.name}': a module is cast once, and it already is")
    check_called(sch, "cast")
    sch.defer("cast", _apply, dtype=dtype)


class Cast(Layer):
    """Converts floating inputs to a format and, where asked, the outputs back."""

    order = 20

    def __init__(self, dtype: torch.dtype, restore: bool) -> None:
        self.dtype = dtype
        self.restore = restore

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given: list[torch.dtype] = []

        def enter(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                given.append(value.dtype)
                return value.to(self.dtype)
            return value

        args, kwargs = tree_map(enter, (args, kwargs))
        output = inner(*args, **kwargs)
        if not self.restore or not given:
            return output
        back = given[0]

        def leave(value: Any) -> Any:
            return value.to(back) if isinstance(value, torch.Tensor) and value.dtype == self.dtype else value

        return tree_map(leave, output)


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, dtype: torch.dtype) -> None:
    _cast(module, dtype, restore=bool(sch.path))
    if context.pipeline is not None:
        # What crosses a cut then crosses it in this format.
        for meta in context.pipeline.metas_below(sch.path):
            _cast(meta, dtype, restore=bool(sch.path))


def _cast(module: nn.Module, dtype: torch.dtype, restore: bool) -> None:
    for each in module.modules():
        for param in parameters_of(each).values():
            # What `final_formats` has cast already may be cut by now.
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                param.data = param.data.to(dtype)
        for name, buffer in buffers_of(each).items():
            saved = name not in unsaved_buffers_of(each)
            if buffer is not None and saved and buffer.is_floating_point():
                buffers_of(each)[name] = buffer.to(dtype)
    add_layer(module, Cast(dtype, restore=restore))


def final_formats(sch: ScheduledModule) -> dict[nn.Parameter, torch.dtype]:
    """The formats of the parameters that deferred casts all turn to one."""
    found: dict[nn.Parameter, set[torch.dtype]] = {}
    for each in sch.tree.deferred:
        if each.apply is _apply:
            for param in find_module(sch.tree.module, each.path).parameters():
                if param.is_floating_point():
                    found.setdefault(param, set()).add(each.arguments["dtype"])
    return {param: next(iter(formats)) for param, formats in found.items() if len(formats) == 1}
