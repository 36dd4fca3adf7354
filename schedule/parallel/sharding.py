"""Parameters and buffers sharded over the tensor-parallel axis of the mesh.

A sharded tensor is this rank's plain local tensor; `module._shards` describes how the whole tensor is cut. Plain tensors
are used rather than DTensor for two reasons: a fused projection (q, k and v in one weight) is cut in strides that no
DTensor placement keeps through an optimizer, and model code written without parallelism in mind computes with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base._torch import buffers_of, children_of, parameters_of
from .checksums import NOTHING, Checksum
from .collectives import Axis, all_gather


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is cut."""

    dim: int
    parts: tuple[int, ...]
    """Sizes along `dim` of the parts that are fused in the whole tensor; each part is cut separately."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    axis: Axis
    """The ranks that share the tensor. If their number does not divide a part, its last pieces are padded with zeros."""
    checksum: Checksum = field(default=NOTHING, compare=False)
    """The checksum of the whole tensor, if it had values when it was cut."""
    then: "Shard | None" = None
    """How the piece is cut further, over the ranks of another axis."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes along which pieces differ."""
        return (self.axis.name, *(self.then.axes if self.then is not None else ()))

    @property
    def padded(self) -> bool:
        """True if some pieces are padded."""
        return any(size % self.axis.size for size in self.parts)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of the whole tensor."""
        parts = [self._filled(each) for each in whole.split(list(self.parts), self.dim)]
        piece = torch.cat([each.chunk(self.axis.size, self.dim)[self.axis.rank] for each in parts], self.dim)
        return piece if self.then is None else self.then.cut(piece)

    def _filled(self, part: torch.Tensor) -> torch.Tensor:
        missing = -part.shape[self.dim] % self.axis.size
        if not missing:
            return part
        shape = [*part.shape[: self.dim], missing, *part.shape[self.dim + 1 :]]
        return torch.cat([part, part.new_zeros(shape)], self.dim)

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor, gathered from all ranks."""
        if self.then is not None:
            local = self.then.join(local)
        stacked = all_gather(local.unsqueeze(0), 0, self.axis)
        sizes = [-(-size // self.axis.size) for size in self.parts]
        pieces = [piece.split(sizes, self.dim) for piece in stacked.unbind(0)]
        parts = [torch.cat([piece[i] for piece in pieces], self.dim) for i in range(len(sizes))]
        return torch.cat([each.narrow(self.dim, 0, n) for each, n in zip(parts, self.parts)], self.dim)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Returns the shards of a module's own tensors by name; empty if none is cut."""
    return module.__dict__.get("_shards", {})


def holders(root: nn.Module, tensor: torch.Tensor) -> list[tuple[str, nn.Module, str]]:
    """Returns every (module path, module, name) at which a tensor is registered; several if it is tied."""
    return [
        (path, module, name)
        for path, module in walk(root)
        for held in (parameters_of(module), buffers_of(module))
        for name, each in held.items()
        if each is tensor
    ]


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the items of `root.named_modules()`, faster: schedules need them at every step."""
    out, seen, stack = [], {root}, [("", root)]
    while stack:
        path, module = stack.pop()
        out.append((path, module))
        children = []
        for name, child in children_of(module).items():
            if child is not None and child not in seen:
                seen.add(child)
                children.append((f"{path}.{name}" if path else name, child))
        stack.extend(reversed(children))
    return out


def cut_tensor(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns this rank's piece as a parameter or buffer of its own, with the attributes of the whole tensor."""
    data = shard.cut(tensor.detach()).contiguous()
    new = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    new.__dict__.update(tensor.__dict__)
    return new


def is_dtensor(value: Any) -> bool:
    """Returns True if a value is a DTensor, as FSDP makes them, without importing DTensor, which takes a second."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's piece of a tensor that FSDP shards, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def piece_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns, for a tensor that FSDP shards, the dimension, the number of ranks, and the index of this rank's piece."""
    mesh = tensor.device_mesh
    ((axis, cut),) = [(axis, each) for axis, each in enumerate(tensor.placements) if each.is_shard()]
    return cut.dim, mesh.size(axis), mesh.get_local_rank(axis)


def whole(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a parameter of a module, or its gradient, gathered from every rank that has a piece."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()
    shard = shards_of(module).get(name)
    return shard.join(tensor) if shard is not None else tensor


def scale_gradients(part: Any, factor: float) -> None:
    """Has FSDP multiply the averaged gradients of a part by a factor, in place."""

    def scale(gradients: torch.Tensor) -> None:
        if gradients.is_cuda:
            # FSDP runs this and what follows on another stream than the one that the buffer belongs to, and does not keep it.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))
        gradients.mul_(factor)

    part.set_all_reduce_hook(scale)


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a scheduled model with the original names and shapes; all ranks call it.

    It loads into the unscheduled model; `load_full_state_dict` loads the state of that into a scheduled model.
    """
    return dict(whole_tensors(module))


def whole_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `full_state_dict`, each gathered when it is asked for; all ranks iterate to the end."""
    for key, value in module.state_dict().items():
        yield key, whole(*owner(module, key), value)


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Loads the state of an unscheduled model into a scheduled one; each rank loads its pieces."""
    pieces: dict[str, Any] = {}
    for key, value in state.items():
        holder, name = owner(module, key)
        shard = shards_of(holder).get(name)
        pieces[key] = shard.cut(value) if shard is not None else value
    own_state = module.state_dict()
    for key, value in pieces.items():
        if is_dtensor(own_state.get(key)):
            from torch.distributed.tensor import distribute_tensor

            pieces[key] = distribute_tensor(value, own_state[key].device_mesh, own_state[key].placements)
    module.load_state_dict(pieces)


def owner(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Returns the module and the tensor's name in it for a key of `state_dict`."""
    path, _, name = key.rpartition(".")
    return root.get_submodule(path), name
