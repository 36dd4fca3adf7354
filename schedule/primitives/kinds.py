"""Effects of sharding on known kinds of modules: counts that change, and how they compute then."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ...base._torch import ConvNd
from ..forward import Layer
from ..parallel.collectives import Axis
from ..parallel.partial import BiasOnce, PartialEmbedding
from ..parallel.sharding import Shard, shards_of

Follow = tuple[nn.Module, str, int]
"""A module, the name of one of its counts, and its divisor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Effects of cutting one dimension of one tensor of a module."""

    side: str | None = None
    """`output`: the output is cut; `input`: the input must be cut, and the output is a partial sum; `vocabulary`: the
    output is a partial sum; None: unknown.
    """
    count: str | tuple[str, ...] = ""
    """Attributes that count along this dimension."""
    layer: Callable[[Axis, Shard], Layer] | None = None
    """Layer that computes with the cut tensor."""

    def follow(self, module: nn.Module, ranks: int) -> list[Follow]:
        """Returns the counts of the module that the ranks divide."""
        names = (self.count,) if isinstance(self.count, str) else self.count
        return [(module, name, ranks) for name in names if name]


def kind_of(module: nn.Module, name: str, dim: int) -> Kind:
    """Returns the effects of cutting `module.<name>` along `dim`."""
    # transformers' Conv1D of GPT-2, a linear layer whose weight is (inputs, outputs); compared by name without an import.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and name == "weight":
        return Kind("output", "nf") if dim == 1 else Kind("input", "nx", _bias_once)
    if isinstance(module, nn.Linear) and name == "weight":
        return Kind("output", "out_features") if dim == 0 else Kind("input", "in_features", _bias_once)
    if isinstance(module, nn.Embedding) and name == "weight":
        if dim == 1:
            return Kind("output", "embedding_dim")
        return Kind("vocabulary", "num_embeddings", lambda axis, shard: PartialEmbedding(axis, shard.shape[0]))
    if isinstance(module, nn.GroupNorm) and name == "weight":
        return Kind(None, ("num_channels", "num_groups"))
    # Channels of grouped and transposed convolutions are arranged differently.
    plain = isinstance(module, ConvNd) and module.groups == 1 and not module.transposed
    if plain and name == "weight" and dim < 2:
        return Kind("output", "out_channels") if dim == 0 else Kind("input", "in_channels", _bias_once)
    return Kind()


def side_of(module: nn.Module) -> str | None:
    """Returns the side along which a module's weights are cut, as in `Kind`; None if it is unknown or none is cut."""
    sides = (kind_of(module, name, shard.dim).side for name, shard in shards_of(module).items())
    return next(filter(None, sides), None)


def _bias_once(axis: Axis, shard: Shard) -> Layer:
    return BiasOnce(axis)
