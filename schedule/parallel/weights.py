"""This rank's shard of each of a model's tensors, as boxes of the full tensor.

Tensor parallelism, then expert parallelism, then FSDP each cut a tensor along one dimension; a fused projection is cut in
strides. A rank therefore has a few runs of indices along every dimension, and its shard is their product.
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

    local_start: int
    """The first index in this rank's tensor."""
    full_start: int
    """The first index in the full tensor."""
    length: int

    def within(self, start: int, stop: int) -> "Run | None":
        """Returns the part of the run at local indices `start` to `stop` - 1, renumbered from 0; None if it is empty."""
        begin, end = max(self.local_start, start), min(self.local_start + self.length, stop)
        return Run(begin - start, self.full_start + begin - self.local_start, end - begin) if begin < end else None


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, on this rank."""

    offset: tuple[int, ...]
    """The first index along each dimension in the full tensor."""
    indices: tuple[slice, ...]
    """The box's indices in this rank's tensor."""

    @property
    def of_whole(self) -> tuple[slice, ...]:
        """The box's indices in the full tensor."""
        return tuple(slice(start, start + index.stop - index.start) for start, index in zip(self.offset, self.indices))


@dataclass(frozen=True, slots=True)
class Region:
    """This rank's shard of a tensor."""

    shape: torch.Size
    """The shape of the full tensor."""
    boxes: tuple[Box, ...]
    """The boxes on this rank; empty if it has no element."""

    @property
    def complete(self) -> bool:
        """True if this rank has the full tensor."""
        sizes = [tuple(index.stop - index.start for index in box.indices) for box in self.boxes]
        return tuple(self.shape) in sizes

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields each box with a view of this rank's tensor in it; the tensor must be sharded as the region is."""
        local_tensor = local(tensor.detach())
        for box in self.boxes:
            yield box, local_tensor[box.indices] if box.indices else local_tensor


def region_of(module: nn.Module, name: str, tensor: torch.Tensor) -> Region:
    """Returns the region of a module's own tensor on this rank, for all kinds of sharding together.

    Args:
        tensor: the tensor, or one that is sharded in the same way, such as its gradient.
    """
    shard = shards_of(module).get(name)
    shape = torch.Size(shard.shape) if shard is not None else tensor.shape
    runs = [[Run(0, 0, size)] for size in shape]
    # In the order of the cuts: tensor parallelism, then experts, then FSDP, each within the shard of the one before.
    while shard is not None:
        runs[shard.dim] = _cut_runs(shard.parts, shard.axis.rank, shard.axis.size)
        shard = shard.then
    if is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements):
        dim, ranks, rank = piece_of(tensor)
        shard_size = -(-tensor.shape[dim] // ranks)  # like torch.chunk: the last shards may be smaller or empty
        clipped = [run.within(rank * shard_size, min((rank + 1) * shard_size, tensor.shape[dim])) for run in runs[dim]]
        runs[dim] = [run for run in clipped if run is not None]
    boxes = tuple(
        Box(
            tuple(run.full_start for run in box_runs),
            tuple(slice(run.local_start, run.local_start + run.length) for run in box_runs),
        )
        for box_runs in product(*runs)
    )
    return Region(shape, boxes)


def whole_region(shape: torch.Size) -> Region:
    """Returns the region of a tensor that is not sharded."""
    return Region(shape, (Box((0,) * len(shape), tuple(slice(0, size) for size in shape)),))


def _cut_runs(parts: tuple[int, ...], rank: int, ranks: int) -> list[Run]:
    """Returns a rank's runs of fused parts, each of which is cut separately, without the padding of their last shards."""
    runs, local_start, full_start = [], 0, 0
    for size in parts:
        shard_size = -(-size // ranks)
        length = min(shard_size, size - rank * shard_size)
        if length > 0:
            runs.append(Run(local_start, full_start + rank * shard_size, length))
        local_start, full_start = local_start + shard_size, full_start + size
    return runs


def regions_of(model: nn.Module, names: Mapping[str, str]) -> dict[str, tuple[torch.Tensor, Region]]:
    """Returns this rank's tensors of a model's state and their regions, by the names in the unsharded model.

    Args:
        names: maps each name of a parameter to the one to use, as tied parameters have several.
    """
    regions = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(key, key)
        if name not in regions and isinstance(tensor, torch.Tensor):
            regions[name] = tensor, region_of(*owner(model, key), tensor)
    return regions
