"""Which part of each of a model's tensors this rank holds, as boxes of the whole tensor.

What cuts a tensor, tensor parallelism, then experts over ranks, then FSDP, cuts it along one dimension each; a fused
projection is cut in strides. Along every dimension what is here is therefore a few runs of indices, and the part is their
product.
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
    """How many they are."""

    def within(self, start: int, stop: int) -> "Run | None":
        """What is left of it where only the indices from `start` to `stop` - 1 are here, which begin at 0 then."""
        first, last = max(self.here, start), min(self.here + self.length, stop)
        return Run(first - start, self.whole + first - self.here, last - first) if first < last else None


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor that is here."""

    offset: tuple[int, ...]
    """Where it begins in the whole tensor."""
    at: tuple[slice, ...]
    """Which indices of this rank's tensor it is."""

    @property
    def of_whole(self) -> tuple[slice, ...]:
        """Which indices of the whole tensor it is."""
        return tuple(slice(at, at + each.stop - each.start) for at, each in zip(self.offset, self.at))


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that is here."""

    shape: torch.Size
    """Of the whole tensor."""
    boxes: tuple[Box, ...]
    """What is here of it; none where this rank has no part."""

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return any(all(at.stop - at.start == n for at, n in zip(box.at, self.shape)) for box in self.boxes)

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box, and this rank's tensor there: views of a tensor that lies as the one this is the region of."""
        here = local(tensor.detach())
        for box in self.boxes:
            yield box, here[box.at] if box.at else here


def region_of(module: nn.Module, name: str, tensor: torch.Tensor) -> Region:
    """Which part of a module's own tensor is here, whatever cuts it.

    Args:
        module: that holds it.
        name: its name there.
        tensor: itself, or one that is cut alike, such as its gradient.
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
    """That of a tensor which is all here."""
    return Region(shape, (Box((0,) * len(shape), tuple(slice(0, size) for size in shape)),))


def _cut_runs(parts: tuple[int, ...], rank: int, ranks: int) -> list[Run]:
    """What a rank has of parts that are cut each by itself, the last pieces filled up with what is no part."""
    out, here, whole = [], 0, 0
    for size in parts:
        each = -(-size // ranks)
        length = min(each, size - rank * each)
        if length > 0:
            out.append(Run(here, whole + rank * each, length))
        here, whole = here + each, whole + size
    return out


def regions_of(model: nn.Module, names: Mapping[str, str]) -> dict[str, tuple[torch.Tensor, Region]]:
    """This rank's tensors of a model's state and where they lie, by the names of the whole model.

    Args:
        model: a scheduled one.
        names: the name of each parameter by each of its names, as tied ones have several.
    """
    out = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(key, key)
        if name not in out and isinstance(tensor, torch.Tensor):
            out[name] = tensor, region_of(*owner(model, key), tensor)
    return out
