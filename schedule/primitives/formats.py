"""Primitives of number formats: cast and float8."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...base._torch import buffers_of, parameters_of, tree_map, unsaved_buffers_of
from ...base.errors import ScheduleError, not_installed, unknown
from ..forward import Inner, Layer, add_layer
from ..graph.called import check_called, check_read
from ..tree import ScheduledModule, find_module, primitive


@primitive
def cast(sch: ScheduledModule, dtype: torch.dtype) -> None:
    """Casts this module's floating parameters and persistent buffers, and its inputs, to `dtype`.

    Below the root, the module's output is cast back to the format of its input, so that the surrounding code is not
    affected. Buffers that are not part of `state_dict` (rotary frequencies) keep their precision. A weight tied to one
    outside this module is cast for both.

    Raises:
        ScheduleError: not a floating-point format, or cast already.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ScheduleError(f"cast on '{sch.name}': dtype must be a floating-point torch.dtype, but got {dtype!r}")
    if dtype.itemsize < 2:
        raise ScheduleError(f"cast on '{sch.name}': {dtype} has no arithmetic in PyTorch; cast to bfloat16 or float16")
    if sch.deferred(_apply_cast):
        raise ScheduleError(f"cast on '{sch.name}': the module is cast already")
    check_called(sch, "cast")
    sch.defer("cast", _apply_cast, dtype=dtype)


def store_frozen(sch: ScheduledModule, dtype: torch.dtype) -> None:
    """Stores the frozen parameters in `dtype`; `build` casts each one as soon as it is initialised."""
    sch.defer("cast", _apply_store_frozen, dtype=dtype)


def _apply_store_frozen(sch: ScheduledModule, module: nn.Module, context: Any, dtype: torch.dtype) -> None:
    for param in _frozen_below(module):
        if param.dtype != dtype:
            param.data = param.data.to(dtype)


def _frozen_below(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if not param.requires_grad and param.is_floating_point()]


class Cast(Layer):
    """Converts floating inputs to a format and, if requested, the outputs back."""

    order = 20

    def __init__(self, dtype: torch.dtype, restore: bool) -> None:
        self.dtype = dtype
        self.restore = restore

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input_dtypes: list[torch.dtype] = []

        def enter(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                input_dtypes.append(value.dtype)
                return value.to(self.dtype)
            return value

        args, kwargs = tree_map(enter, (args, kwargs))
        output = inner(*args, **kwargs)
        if not self.restore or not input_dtypes:
            return output
        input_dtype = input_dtypes[0]

        def leave(value: Any) -> Any:
            return value.to(input_dtype) if isinstance(value, torch.Tensor) and value.dtype == self.dtype else value

        return tree_map(leave, output)


def _apply_cast(sch: ScheduledModule, module: nn.Module, context: Any, dtype: torch.dtype) -> None:
    _cast(module, dtype, restore=bool(sch.path))
    if context.pipeline is not None:
        # The skeleton determines the dtypes of tensors that stages send.
        for meta in context.pipeline.metas_below(sch.path):
            _cast(meta, dtype, restore=bool(sch.path))


def _cast(module: nn.Module, dtype: torch.dtype, restore: bool) -> None:
    for submodule in module.modules():
        for param in parameters_of(submodule).values():
            # Parameters that `final_formats` has cast already may be sharded by now.
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                param.data = param.data.to(dtype)
        for name, buffer in buffers_of(submodule).items():
            saved = name not in unsaved_buffers_of(submodule)
            if buffer is not None and saved and buffer.is_floating_point():
                buffers_of(submodule)[name] = buffer.to(dtype)
    add_layer(module, Cast(dtype, restore=restore))


SCALINGS = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}
"""Recipes of torchao, with a scale per tensor or per row, and the coarsest format of each."""
MULTIPLE = 16
"""Both sizes of a weight must be multiples of this, the tile size of 8-bit products on the device."""


@primitive
def float8(sch: ScheduledModule, scaling: str = "tensorwise", emulate: bool = False) -> None:
    """Computes the products of the linear layers at or below this module in 8 bits, forward and backward.

    Weights do not change, nor do the names in `state_dict`: operands are scaled and rounded for each product.
    `tensorwise` has inputs and weights in e4m3 and gradients in e5m2, `rowwise` all in e4m3. Results are in the format
    of the input, or autocast's. Only an `nn.Linear` (no subclass) is converted, if both sizes of this rank's shard are
    multiples of 16. Without `compile` the scaling costs more time than the products save.

    Args:
        scaling: granularity of scales, see SCALINGS.
        emulate: rounds in the same way but multiplies in the input's format, on a device without 8-bit products.

    Raises:
        ScheduleError: torchao is not installed; no such scaling; called before; or no such linear layer.

    Source: https://docs.pytorch.org/ao/stable/ (torchao.float8); Micikevicius et al., FP8 Formats for Deep Learning
    (2022).
    """
    label = f"float8 on '{sch.name}'"
    if scaling not in SCALINGS:
        raise ScheduleError(f"{label}: {unknown('scaling', scaling, SCALINGS)}")
    if reason := not_installed("torchao", "fp8"):
        raise ScheduleError(f"{label}: {reason}")
    if sch.deferred(_apply_float8):
        raise ScheduleError(f"{label}: the module is converted already")
    if reason := obstacle([sch.module]):
        raise ScheduleError(f"{label}: {reason}")
    check_read(sch, "float8", convertible(sch.module))
    # With the casts: before a module is checkpointed, compiled or cut over replicas.
    sch.defer("cast", _apply_float8, scaling=scaling, emulate=emulate, dtype=SCALINGS[scaling])


def convertible(module: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers at or below a module that `float8` converts."""
    return [
        submodule
        for submodule in module.modules()
        if type(submodule) is nn.Linear and not any(size % MULTIPLE for size in submodule.weight.shape)
    ]


def obstacle(modules: Iterable[nn.Module]) -> str | None:
    """Returns why `float8` has nothing to convert in some modules; None if it has."""
    if any(convertible(module) for module in modules):
        return None
    return f"8-bit products take an nn.Linear whose two sizes are multiples of {MULTIPLE}, and there is none"


def _apply_float8(
    sch: ScheduledModule, module: nn.Module, context: Any, scaling: str, emulate: bool, dtype: torch.dtype
) -> None:
    # `dtype` is not used here: `verify` reads it from the deferred work for its tolerance.
    if context.pipeline is not None and context.pipeline.absent(sch.path):
        return
    check_read(sch, "float8", convertible(module))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The gradient of a weight is a sum over tokens, whose number need not be a multiple of 16: padded with zeros.
    config = replace(Float8LinearConfig.from_recipe_name(scaling), pad_inner_dim=True, emulate=emulate)
    for linear in convertible(module):
        converted = convert_to_float8_training(linear, config=config)
        # In place: layers around its forward, its sharding and references to it remain.
        linear.__class__ = type(converted)
        linear.__dict__.update({name: value for name, value in vars(converted).items() if name not in vars(linear)})


def final_formats(sch: ScheduledModule) -> dict[nn.Parameter, torch.dtype]:
    """Returns the final formats of parameters, except where deferred casts disagree."""
    candidates: dict[nn.Parameter, set[torch.dtype]] = {}
    for work in sch.tree.deferred:
        if work.apply is _apply_cast:
            for param in find_module(sch.tree.module, work.path).parameters():
                if param.is_floating_point():
                    candidates.setdefault(param, set()).add(work.arguments["dtype"])
        elif work.apply is _apply_store_frozen:
            for param in _frozen_below(find_module(sch.tree.module, work.path)):
                candidates.setdefault(param, set()).add(work.arguments["dtype"])
    return {param: next(iter(formats)) for param, formats in candidates.items() if len(formats) == 1}
