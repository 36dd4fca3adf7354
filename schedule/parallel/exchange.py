"""How modules compute with sharded weights: hooks that apply collectives to inputs, outputs and gradients, layers for partial
sums, and counts that change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...base._torch import ConvNd, forward_hooks_of, parameters_of, tree_flatten, tree_unflatten
from ..forward import Inner, Layer, layers_of
from . import collectives
from .collectives import Axis, through
from .sharding import Shard, shards_of


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


class WithoutBias(Layer):
    """Runs a linear layer without its bias; the surrounding graph adds it."""

    order = 5
    alters = True

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return nn.functional.linear(args[0] if args else kwargs["input"], module.weight)


class BiasOnce(Layer):
    """Adds the bias on one rank, so that the sum over ranks includes it once; every rank gets its full gradient."""

    order = 10

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias = parameters_of(module).get("bias")
        if bias is None:
            return inner(*args, **kwargs)
        # Zeros on the other ranks rather than no bias: every rank gets its gradient, so that replicas stay equal.
        added = once(self.axis)(bias)
        if layers_of(module, WithoutBias):
            return inner(*args, **kwargs)
        if type(module) is nn.Linear:
            return nn.functional.linear(args[0] if args else kwargs["input"], module.weight, added)
        # Other forwards read `self.bias`: it is replaced for the duration of the call.
        parameters_of(module)["bias"] = added
        try:
            return inner(*args, **kwargs)
        finally:
            parameters_of(module)["bias"] = bias


def once(axis: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that zeroes a bias on all ranks but the first, so that the sum over ranks includes it once.

    Every rank gets the bias's full gradient.
    """
    return partial(through, forward=None if axis.rank == 0 else torch.zeros_like)


class PartialEmbedding(Layer):
    """Looks up the tokens of this rank's shard of the vocabulary; the result is zero for other tokens."""

    order = 10

    def __init__(self, axis: Axis, size: int) -> None:
        self.axis = axis
        self.size = size

    def __call__(self, module: Any, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = args[0] if args else kwargs["input"]
        shard_size = -(-self.size // self.axis.size)
        shifted = tokens - self.axis.rank * shard_size
        in_shard = (shifted >= 0) & (shifted < shard_size)
        padding = module.padding_idx
        if padding is not None:
            padding -= self.axis.rank * shard_size
            # The padding token has no row here if it is outside this rank's shard.
            padding = padding if 0 <= padding < shard_size else None
        rows = self._rows(module, inner, shifted.where(in_shard, 0), padding)
        return rows * in_shard.unsqueeze(-1)

    @staticmethod
    def _rows(module: nn.Embedding, inner: Inner, tokens: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Looks up local tokens. Subclasses keep their own forward, which may also scale (Gemma)."""
        if type(module) is nn.Embedding and module.max_norm is None:
            return nn.functional.embedding(tokens, module.weight, padding)
        padding_idx, module.padding_idx = module.padding_idx, padding
        try:
            return inner(tokens)
        finally:
            module.padding_idx = padding_idx


Follow = tuple[nn.Module, str, int]
"""A module, the name of one of its counts, and its divisor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Effects of cutting one dimension of one tensor of a module."""

    side: str | None = None
    """`output`: the output is cut; `input`: the input must be cut, and the output is a partial sum; `vocabulary`: the
    output is a partial sum; None: unknown.
    """
    counts: tuple[str, ...] = ()
    """Attributes that count along this dimension."""
    layer: Callable[[Axis, Shard], Layer] | None = None
    """Layer that computes with the cut tensor."""

    def follow(self, module: nn.Module, ranks: int) -> list[Follow]:
        """Returns the counts of the module that the ranks divide."""
        return [(module, name, ranks) for name in self.counts]


def kind_of(module: nn.Module, name: str, dim: int) -> Kind:
    """Returns the effects of cutting `module.<name>` along `dim`."""
    # transformers' Conv1D of GPT-2, a linear layer whose weight is (inputs, outputs); compared by name without an import.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and name == "weight":
        return Kind("output", ("nf",)) if dim == 1 else Kind("input", ("nx",), _bias_once)
    if isinstance(module, nn.Linear) and name == "weight":
        return Kind("output", ("out_features",)) if dim == 0 else Kind("input", ("in_features",), _bias_once)
    if isinstance(module, nn.Embedding) and name == "weight":
        if dim == 1:
            return Kind("output", ("embedding_dim",))
        return Kind("vocabulary", ("num_embeddings",), lambda axis, shard: PartialEmbedding(axis, shard.shape[0]))
    if isinstance(module, nn.GroupNorm) and name == "weight":
        return Kind(None, ("num_channels", "num_groups"))
    # Channels of grouped and transposed convolutions are arranged differently.
    plain = isinstance(module, ConvNd) and module.groups == 1 and not module.transposed
    if plain and name == "weight" and dim < 2:
        return Kind("output", ("out_channels",)) if dim == 0 else Kind("input", ("in_channels",), _bias_once)
    return Kind()


def side_of(module: nn.Module) -> str | None:
    """Returns the side along which a module's weights are cut, as in `Kind`; None if it is unknown or none is cut."""
    sides = (kind_of(module, name, shard.dim).side for name, shard in shards_of(module).items())
    return next(filter(None, sides), None)


def _bias_once(axis: Axis, shard: Shard) -> Layer:
    return BiasOnce(axis)
