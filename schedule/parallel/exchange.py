"""Hooks that apply collectives to the inputs, outputs and gradients of a module."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...base._torch import forward_hooks_of, parameters_of, tree_flatten, tree_unflatten
from . import collectives
from .collectives import Axis
from .sharding import shards_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """One `sync` of a module: the collective, its operand, and when it runs."""

    mode: str
    """`fwd_pre`, `fwd_post`, `bwd_pre` or `bwd_post`."""
    op: str | Callable[[torch.Tensor], torch.Tensor]
    """The collective, or a function of a tensor."""
    axis: int | None = None
    """The dimension that the collective acts along."""
    on: str = "activations"
    """`activations` or `parameters`."""
    join: int | None = None
    """The dimension along which `all_to_all` concatenates."""
    gradient: str | None = None
    """How the gradient of `all_gather` is computed, if given."""


class InputSync:
    """Applies a function to the first floating-point input, or to all that require gradients."""

    def __init__(self, sync: Sync, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sync = sync
        self.function = function
        self.first = sync.mode == "fwd_pre"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (self.first or leaf.requires_grad):
                leaves[index] = self.function(leaf)
                if self.first:
                    break
        return tree_unflatten(leaves, spec)


class OutputSync:
    """Applies a function to the first floating-point output."""

    def __init__(self, sync: Sync, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sync = sync
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaves[index] = self.function(leaf)
                return tree_unflatten(leaves, spec)
        return output


class ParameterSync:
    """Sums the gradients of a module's own unsharded parameters over the ranks, at every backward pass."""

    def __init__(self, sync: Sync, axis: Axis) -> None:
        self.sync = sync
        self.axis = axis
        self.hooked = (
            WeakTensorKeyDictionary()
        )  # `build` may replace parameters: each new one gets a hook at its first use

    def __getstate__(self) -> dict[str, Any]:
        # Hooks on tensors are not copied with the tensors: a copy registers its own.
        return {"sync": self.sync, "axis": self.axis}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.sync, self.axis, self.hooked = state["sync"], state["axis"], WeakTensorKeyDictionary()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, param in parameters_of(module).items():
            if param is None or not param.requires_grad or name in shards_of(module) or param in self.hooked:
                continue
            # A tensor hook runs before accumulation, so that each backward pass sums its own gradient only.
            param.register_hook(partial(collectives.all_reduce, axis=self.axis))
            self.hooked[param] = True


Exchange = InputSync | OutputSync | ParameterSync
"""The hook that a `sync` registers on a module."""


def syncs_of(module: nn.Module) -> list[Sync]:
    """Returns every `sync` on a module in the order of registration, those before the forward first."""
    return [hook.sync for hook in forward_hooks_of(module) if isinstance(hook, Exchange)]
