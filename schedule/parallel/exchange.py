"""Hooks by which ranks exchange what goes into a module, comes out of it, or flows back through it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch import parameters_of, tree_flatten, tree_unflatten
from . import collectives
from .collectives import Axis
from .sharding import shards_of


class InputSync:
    """Passes the first floating input, or all that need gradients, through a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], first: bool) -> None:
        self.function = function
        self.first = first

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (self.first or leaf.requires_grad):
                leaves[i] = self.function(leaf)
                if self.first:
                    break
        return tree_unflatten(leaves, spec)


class OutputSync:
    """Passes the first floating output through a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        for i, leaf in enumerate(leaves):
            if _floating(leaf):
                leaves[i] = self.function(leaf)
                return tree_unflatten(leaves, spec)
        return output


class ParameterSync:
    """Sums the gradients of a module's own whole parameters over the ranks, at every backward."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.hooked = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Hooks on tensors are not copied along with the tensors: a copy sets its own.
        return {"axis": self.axis}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.axis, self.hooked = state["axis"], WeakTensorKeyDictionary()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, param in parameters_of(module).items():
            if param is None or not param.requires_grad or name in shards_of(module) or param in self.hooked:
                continue
            param.register_hook(partial(collectives.all_reduce, axis=self.axis))
            self.hooked[param] = True


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
