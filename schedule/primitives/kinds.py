"""What sharding means to the known kinds of modules: which counts follow, and how they compute then."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..._torch import ConvNd, parameters_of
from ..forward import Layer, layers_of
from ..parallel.collectives import Axis, through
from ..parallel.sharding import Shard, shards_of

Follow = tuple[nn.Module, str, int]
"""A module, the name of one of its counts, and what the count is divided by."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What cutting one dimension of one tensor of a module entails."""

    side: str = ""
    """`output`: the output is cut; `input`: the input must be cut, the output is a partial sum;
    `vocabulary`: the output is a partial sum; empty: nothing is known."""
    count: str | tuple[str, ...] = ""
    """The attributes that count along this dimension."""
    layer: Callable[[Axis, Shard], Layer] | None = None
    """How the module computes then."""

    def follow(self, module: nn.Module, ranks: int) -> list[Follow]:
        """The module's own counts, where it has any."""
        names = (self.count,) if isinstance(self.count, str) else self.count
        return [(module, name, ranks) for name in names if name]


def kind_of(module: nn.Module, name: str, dim: int) -> Kind:
    """What cutting `module.<name>` along `dim` entails."""
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and name == "weight":
        return Kind("output", "nf") if dim == 1 else Kind("input", "nx", _bias_once)
    if isinstance(module, nn.Linear) and name == "weight":
        return Kind("output", "out_features") if dim == 0 else Kind("input", "in_features", _bias_once)
    if isinstance(module, nn.Embedding) and name == "weight":
        if dim == 1:
            return Kind("output", "embedding_dim")
        return Kind("vocabulary", "num_embeddings", lambda axis, shard: PartialEmbedding(axis, shard.shape[0]))
    if isinstance(module, nn.GroupNorm) and name == "weight":
        return Kind("", ("num_channels", "num_groups"))
    plain = isinstance(module, ConvNd) and module.groups == 1 and not module.transposed
    if plain and name == "weight" and dim < 2:
        return Kind("output", "out_channels") if dim == 0 else Kind("input", "in_channels", _bias_once)
    return Kind()


def output_of(module: nn.Module) -> str:
    """What a module's sharded weights make of its output: `split`, `partial`, or empty for neither."""
    for name, shard in shards_of(module).items():
        side = kind_of(module, name, shard.dim).side
        if side:
            return "split" if side == "output" else "partial"
    return ""


def input_of(module: nn.Module) -> str:
    """What a module's sharded weights ask of its input: `split`, `whole`, or empty for either."""
    for name, shard in shards_of(module).items():
        side = kind_of(module, name, shard.dim).side
        if side:
            return "split" if side == "input" else "whole"
    return ""


class WithoutBias(Layer):
    """Runs a linear layer without its bias, which the graph around it adds."""

    order = 5
    alters = True

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return nn.functional.linear(args[0] if args else kwargs["input"], module.weight)


class BiasOnce(Layer):
    """Adds the bias on one rank, so that it is in the sum over ranks once; its gradient is whole on each."""

    order = 10

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bias = parameters_of(module).get("bias")
        if bias is None:
            return inner(*args, **kwargs)
        once = through(bias, forward=None if self.axis.rank == 0 else torch.zeros_like)
        if layers_of(module, WithoutBias):
            return inner(*args, **kwargs)
        if type(module) is nn.Linear:
            return nn.functional.linear(args[0] if args else kwargs["input"], module.weight, once)
        # Other forwards read `self.bias`: for the call they find the stand-in there.
        parameters_of(module)["bias"] = once
        try:
            return inner(*args, **kwargs)
        finally:
            parameters_of(module)["bias"] = bias


def _bias_once(axis: Axis, shard: Shard) -> Layer:
    return BiasOnce(axis)


class PartialEmbedding(Layer):
    """Looks up the tokens of this rank's part of the vocabulary; others give zeros."""

    order = 10

    def __init__(self, axis: Axis, size: int) -> None:
        self.axis = axis
        self.size = size

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tokens = args[0] if args else kwargs["input"]
        local = -(-self.size // self.axis.size)
        shifted = tokens - self.axis.rank * local
        mine = (shifted >= 0) & (shifted < local)
        padding = module.padding_idx
        if padding is not None:
            padding -= self.axis.rank * local
            # Outside of this rank's part, the padding token has no row here.
            padding = padding if 0 <= padding < local else None
        rows = nn.functional.embedding(shifted.where(mine, 0), module.weight, padding)
        return rows * mine.unsqueeze(-1)
