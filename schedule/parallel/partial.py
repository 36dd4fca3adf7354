"""How known kinds of modules compute with sharded weights: counts that change, and layers for partial sums."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base._torch import ConvNd, parameters_of
from ..forward import Inner, Layer, layers_of
from .collectives import Axis, through
from .sharding import Shard, shards_of


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
