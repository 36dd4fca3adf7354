"""The part of each of a model's tensors on this rank, as boxes of the whole tensor.

Tensor parallelism, then expert parallelism, then FSDP each cut a tensor along one dimension; a fused projection is cut in
strides. This rank therefore has a few runs of indices along every dimension, and its part is their product.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from .sharding import is_dtensor, local, owner, piece_of, shards_of


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive indices along one dimension."""

    here: int
    """The first of them in this rank's tensor."""
    whole: int
    """The first of them in the whole tensor."""
    length: int

    def within(self, start: int, stop: int) -> "Run | None":
        """Returns the part of the run at local indices `start` to `stop` - 1, renumbered from 0; None if it is empty."""
        first, last = max(self.here, start), min(self.here + self.length, stop)
        return Run(first - start, self.whole + first - self.here, last - first) if first < last else None


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, on this rank."""

    offset: tuple[int, ...]
    """The first index along each dimension in the whole tensor."""
    at: tuple[slice, ...]
    """Its indices in this rank's tensor."""

    @property
    def of_whole(self) -> tuple[slice, ...]:
        """Its indices in the whole tensor."""
        return tuple(slice(at, at + each.stop - each.start) for at, each in zip(self.offset, self.at))


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor on this rank."""

    shape: torch.Size
    """The shape of the whole tensor."""
    boxes: tuple[Box, ...]
    """The boxes on this rank; empty if it has no part."""

    @property
    def complete(self) -> bool:
        """True if this rank has the whole tensor."""
        return any(all(at.stop - at.start == n for at, n in zip(box.at, self.shape)) for box in self.boxes)

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields each box with a view of this rank's tensor in it; the tensor must be sharded as the region is."""
        here = local(tensor.detach())
        for box in self.boxes:
            yield box, here[box.at] if box.at else here


def region_of(module: nn.Module, name: str, tensor: torch.Tensor) -> Region:
    """Returns the part of a module's own tensor on this rank, over all kinds of sharding.

    Args:
        tensor: the tensor, or one that is sharded alike, such as its gradient.
    """
    shard = shards_of(module).get(name)
    shape = torch.Size(shard.shape) if shard is not None else tensor.shape
    runs = [[Run(0, 0, size)] for size in shape]
    while shard is not None:
        runs[shard.dim] = _cut_runs(shard.parts, shard.axis.rank, shard.axis.size)
        shard = shard.then
    if is_dtensor(tensor) and any(each.is_shard() for each in tensor.placements):
        dim, ranks, rank = piece_of(tensor)
        each = -(-tensor.shape[dim] // ranks)
        left = [run.within(rank * each, min((rank + 1) * each, tensor.shape[dim])) for run in runs[dim]]
        runs[dim] = [run for run in left if run is not None]
    boxes = tuple(
        Box(tuple(run.whole for run in each), tuple(slice(run.here, run.here + run.length) for run in each))
        for each in product(*runs)
    )
    return Region(shape, boxes)


def whole_region(shape: torch.Size) -> Region:
    """Returns the region of a tensor that this rank has as a whole."""
    return Region(shape, (Box((0,) * len(shape), tuple(slice(0, size) for size in shape)),))


def _cut_runs(parts: tuple[int, ...], rank: int, ranks: int) -> list[Run]:
    """Returns a rank's runs of parts that are cut separately, without the padding of their last pieces."""
    out, here, whole = [], 0, 0
    for size in parts:
        each = -(-size // ranks)
        length = min(each, size - rank * each)
        if length > 0:
            out.append(Run(here, whole + rank * each, length))
        here, whole = here + each, whole + size
    return out


def regions_of(model: nn.Module, names: Mapping[str, str]) -> dict[str, tuple[torch.Tensor, Region]]:
    """Returns this rank's tensors of a model's state and their regions, by the names of the whole model.

    Args:
        names: maps each name of a parameter to the one to use, as tied parameters have several.
    """
    out = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(key, key)
        if name not in out and isinstance(tensor, torch.Tensor):
            out[name] = tensor, region_of(*owner(model, key), tensor)
    return out
