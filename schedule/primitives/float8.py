"""float8: the products of linear layers in 8 bits, by torchao."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError, not_installed, unknown
from ..graph.called import check_read
from ..primitive import primitive
from ..tree import ScheduledModule

SCALINGS = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}
"""Recipes of torchao, a scale for a tensor or for each of its rows, and the coarsest format of each."""
MULTIPLE = 16
"""What both sizes of a weight must be multiples of: the device multiplies 8-bit numbers in such pieces."""


@primitive
def float8(sch: ScheduledModule, scaling: str = "tensorwise", emulate: bool = False) -> None:
    """Computes the products of the linear layers at or below this module in 8 bits, forward and backward.

    Weights stay as they are, and so do the names in `state_dict`: what a product takes is scaled and rounded
    for it alone. `tensorwise` has inputs and weights in e4m3 and gradients in e5m2, `rowwise` all in e4m3.
    Results are in the format of the input, autocast's where that is on. Only an `nn.Linear` (no subclass)
    takes part, and one whose sizes, of this rank's piece, are multiples of 16. Without `compile` the scaling
    costs more than the products save.

    Args:
        scaling: what shares a scale, see SCALINGS.
        emulate: rounds alike but multiplies in the input's format, on a device that has no 8-bit products.

    Raises:
        ScheduleError: torchao is not installed; no such scaling; called before; no such linear layer.

    Source: https://docs.pytorch.org/ao/stable/ (torchao.float8); Micikevicius et al., FP8 Formats for Deep
    Learning (2022).
    """
    label = f"float8 on '{sch.name}'"
    if scaling not in SCALINGS:
        raise ScheduleError(f"{label}: {unknown('scaling', scaling, SCALINGS)}")
    if why := not_installed("torchao", "fp8"):
        raise ScheduleError(f"{label}: {why}")
    if sch.deferred(_apply):
        raise ScheduleError(f"{label}: a module is converted once, and it already is")
    if why := obstacle([sch.module]):
        raise ScheduleError(f"{label}: {why}")
    check_read(sch, "float8", convertible(sch.module))
    # With the casts: before a module is checkpointed, compiled or cut over replicas.
    sch.defer("cast", _apply, scaling=scaling, emulate=emulate, dtype=SCALINGS[scaling])


def convertible(module: nn.Module) -> list[nn.Linear]:
    """The linear layers at or below a module that `float8` converts."""
    return [
        each
        for each in module.modules()
        if type(each) is nn.Linear and not any(size % MULTIPLE for size in each.weight.shape)
    ]


def obstacle(modules: Iterable[nn.Module]) -> str:
    """Why `float8` has nothing to convert in some modules; empty where it has."""
    if any(convertible(each) for each in modules):
        return ""
    return f"8-bit products take an nn.Linear whose two sizes are multiples of {MULTIPLE}, and there is none"


def _apply(
    sch: ScheduledModule, module: nn.Module, context: Any, scaling: str, emulate: bool, dtype: torch.dtype
) -> None:
    # The format is for `verify`, whose tolerances follow from it.
    if context.pipeline is not None and context.pipeline.absent(sch.path):
        return
    check_read(sch, "float8", convertible(module))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The gradient of a weight is a sum over tokens, of which there may be any number: filled up with zeros.
    config = replace(Float8LinearConfig.from_recipe_name(scaling), pad_inner_dim=True, emulate=emulate)
    for each in convertible(module):
        made = convert_to_float8_training(each, config=config)
        # In place: what is around the layer's forward, how it is cut and who refers to it stay.
        each.__class__ = type(made)
        each.__dict__.update({name: value for name, value in vars(made).items() if name not in vars(each)})
