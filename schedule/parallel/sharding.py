"""Parameters and buffers sharded over the axes of the mesh, and this rank's shard of each as boxes of the full tensor.

A sharded tensor is this rank's plain local tensor; `module._shards` describes how the full tensor is cut. Plain tensors
are used instead of DTensor for two reasons: a fused projection (q, k and v in one weight) is cut in strides that no
DTensor placement preserves through an optimizer, and model code without support for parallelism computes with them.

Tensor parallelism, then expert parallelism, then FSDP each cut a tensor along one dimension, a fused projection in strides. A
rank therefore has a few runs of indices along every dimension, and its shard is their product: boxes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn

from ...base._torch import buffers_of, children_of, parameters_of
from .collectives import Axis, all_gather

Checksum = tuple[int, int]
NOTHING: Checksum = (0, 0)
"""The checksum of a tensor without values: on the meta device, or empty."""
CHUNK = 1 << 21
"""Integers that are summed at once: 16 MiB for each temporary tensor of 64-bit integers."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> Checksum:
    """Returns two sums over the bits of a tensor's values as integers, the second weighted by position; they wrap around at
    64 bits. Tensors that differ in a bit, or in the order of their elements, almost never have equal sums.
    """
    if tensor.is_meta or not tensor.numel():
        return NOTHING
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = plain.detach().contiguous().view(-1).view(_INTEGERS[min(plain.element_size(), 4)])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(integers.split(CHUNK)):
        positions = torch.arange(1, chunk.numel() + 1, device=chunk.device) + number * CHUNK
        sums[0] += chunk.sum(dtype=torch.int64)
        sums[1] += (chunk * positions).sum()
    total, weighted_total = sums.tolist()
    return total, weighted_total


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is cut."""

    dim: int
    parts: tuple[int, ...]
    """Sizes along `dim` of the parts that are fused in the full tensor; each part is cut separately."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    axis: Axis
    """The ranks that share the tensor. If their number does not divide a part, its last shards are padded with zeros."""
    checksum: Checksum = field(default=NOTHING, compare=False)
    """The checksum of the full tensor, if it had values when it was cut."""
    then: "Shard | None" = None
    """How the shard is cut further, over the ranks of another axis."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes along which shards differ."""
        return (self.axis.name, *(self.then.axes if self.then is not None else ()))

    @property
    def padded(self) -> bool:
        """True if some shards are padded."""
        return any(size % self.axis.size for size in self.parts)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of the full tensor."""
        padded_parts = [self._pad(part) for part in full.split(list(self.parts), self.dim)]
        shard = torch.cat([part.chunk(self.axis.size, self.dim)[self.axis.rank] for part in padded_parts], self.dim)
        return shard if self.then is None else self.then.cut(shard)

    def _pad(self, part: torch.Tensor) -> torch.Tensor:
        padding = -part.shape[self.dim] % self.axis.size
        if not padding:
            return part
        shape = [*part.shape[: self.dim], padding, *part.shape[self.dim + 1 :]]
        return torch.cat([part, part.new_zeros(shape)], self.dim)

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor, gathered from all ranks."""
        if self.then is not None:
            local = self.then.join(local)
        # Gathered along a new dimension: with several parts the shards interleave along `dim`.
        stacked = all_gather(local.unsqueeze(0), 0, self.axis)
        sizes = [-(-size // self.axis.size) for size in self.parts]
        shard_parts = [shard.split(sizes, self.dim) for shard in stacked.unbind(0)]
        joined_parts = [torch.cat([shard[index] for shard in shard_parts], self.dim) for index in range(len(sizes))]
        # Without the padding of the last shards.
        return torch.cat([part.narrow(self.dim, 0, size) for part, size in zip(joined_parts, self.parts)], self.dim)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Returns the shards of a module's own tensors by name; empty if none is cut."""
    return module.__dict__.get("_shards", {})


def holders(root: nn.Module, tensor: torch.Tensor) -> list[tuple[str, nn.Module, str]]:
    """Returns every (module path, module, name) at which a tensor is registered; several if it is tied."""
    return [
        (path, module, name)
        for path, module in walk(root)
        for tensors in (parameters_of(module), buffers_of(module))
        for name, registered in tensors.items()
        if registered is tensor
    ]


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the items of `root.named_modules()`, but faster, because primitives call it often."""
    visited, seen, stack = [], {root}, [("", root)]
    while stack:
        path, module = stack.pop()
        visited.append((path, module))
        children = []
        for name, child in children_of(module).items():
            if child is not None and child not in seen:
                seen.add(child)
                children.append((f"{path}.{name}" if path else name, child))
        stack.extend(reversed(children))
    return visited


def cut_tensor(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns this rank's shard as a new parameter or buffer, with the attributes of the full tensor."""
    return with_data(tensor, shard.cut(tensor.detach()).contiguous())


def with_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Returns a parameter or buffer like `tensor`, with its attributes, and other data."""
    copied = data
    if isinstance(tensor, nn.Parameter):
        copied = type(tensor)(data, requires_grad=tensor.requires_grad)
    copied.__dict__.update(tensor.__dict__)
    return copied


def is_dtensor(value: Any) -> bool:
    """Returns True if a value is a DTensor, as FSDP makes them, without importing DTensor, which takes a second."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor that FSDP shards, sharing its memory, and any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def piece_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns, for a tensor that FSDP shards, the dimension, the number of ranks, and the index of this rank's shard."""
    mesh = tensor.device_mesh
    ((axis, placement),) = [
        (axis, placement) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    ]
    return placement.dim, mesh.size(axis), mesh.get_local_rank(axis)


def whole(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a parameter of a module, or its gradient, gathered from every rank that has a shard."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()
    shard = shards_of(module).get(name)
    return shard.join(tensor) if shard is not None else tensor


def scale_gradients(module: Any, factor: float) -> None:
    """Makes FSDP multiply the averaged gradients of a module's unit by a factor, in place."""

    def scale(gradients: torch.Tensor) -> None:
        if gradients.is_cuda:
            # FSDP runs this and later work on another stream than that of the buffer, and does not keep the buffer alive.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))
        gradients.mul_(factor)

    module.set_all_reduce_hook(scale)


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a scheduled model with the original names and shapes; all ranks call it.

    It loads into the unscheduled model; `load_full_state_dict` loads the state of that into a scheduled model.
    """
    return dict(whole_tensors(module))


def whole_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `full_state_dict`, each gathered when the iterator reaches it; all ranks iterate to the end."""
    for key, value in module.state_dict().items():
        yield key, whole(*owner(module, key), value)


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Loads the state of an unscheduled model into a scheduled one; each rank loads its shards."""
    local_state: dict[str, Any] = {}
    for key, value in state.items():
        holder, name = owner(module, key)
        shard = shards_of(holder).get(name)
        local_state[key] = shard.cut(value) if shard is not None else value
    own_state = module.state_dict()
    for key, value in local_state.items():
        if is_dtensor(own_state.get(key)):
            from torch.distributed.tensor import distribute_tensor

            local_state[key] = distribute_tensor(value, own_state[key].device_mesh, own_state[key].placements)
    module.load_state_dict(local_state)


def owner(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Returns the module and the tensor's name in it for a key of `state_dict`."""
    path, _, name = key.rpartition(".")
    return root.get_submodule(path), name


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
