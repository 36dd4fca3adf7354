"""Parameters and buffers cut over the tensor-parallel axis of the mesh.

A sharded tensor is this rank's plain local tensor; what it is a piece of is kept beside it in the module, in
`module._shards`. Plain tensors rather than DTensor, because a fused projection (q, k and v in one weight)
is cut in strides that no DTensor placement keeps through an optimizer, and because any model code, written
without parallelism in mind, computes with them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base._torch import buffers_of, children_of, parameters_of
from ..deferred import noted
from .checksums import NOTHING, Checksum
from .collectives import Axis, all_gather


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is cut."""

    dim: int
    """The dimension that is cut."""
    parts: tuple[int, ...]
    """Sizes along it of what is fused in the whole tensor; each part is cut by itself."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    axis: Axis
    """The ranks that share it. Where they do not divide a part, its last pieces are filled up with zeros."""
    checksum: Checksum = field(default=NOTHING, compare=False)
    """Of the whole tensor, where it had values when it was cut."""
    then: "Shard | None" = None
    """How the piece is cut further, over the ranks of another axis."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes whose ranks hold other pieces."""
        return (self.axis.name, *(self.then.axes if self.then is not None else ()))

    @property
    def padded(self) -> bool:
        """Whether pieces are filled up."""
        return any(size % self.axis.size for size in self.parts)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the whole tensor."""
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
        """The whole tensor, gathered from all ranks."""
        if self.then is not None:
            local = self.then.join(local)
        stacked = all_gather(local.unsqueeze(0), 0, self.axis)
        sizes = [-(-size // self.axis.size) for size in self.parts]
        pieces = [piece.split(sizes, self.dim) for piece in stacked.unbind(0)]
        parts = [torch.cat([piece[i] for piece in pieces], self.dim) for i in range(len(sizes))]
        return torch.cat([each.narrow(self.dim, 0, n) for each, n in zip(parts, self.parts)], self.dim)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """How a module's own tensors are cut, by name; empty where none is."""
    return module.__dict__.get("_shards", {})


def full_shape(module: nn.Module, name: str) -> torch.Size | None:
    """The shape of a sharded tensor when whole; None where it is not sharded."""
    shard = shards_of(module).get(name)
    return torch.Size(shard.shape) if shard is not None else None


def holders(root: nn.Module, tensor: torch.Tensor) -> list[tuple[str, nn.Module, str]]:
    """Every (module path, module, name) that holds a tensor; several where it is tied."""
    return [
        (path, module, name)
        for path, module in walk(root)
        for held in (parameters_of(module), buffers_of(module))
        for name, each in held.items()
        if each is tensor
    ]


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `root.named_modules()` yields, sooner: schedules ask for it at every step."""
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


def put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor in the place of a parameter or buffer."""
    (parameters_of(module) if name in parameters_of(module) else buffers_of(module))[name] = tensor


def cut_tensor(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This rank's piece as a parameter or buffer of its own, with the attributes of the whole."""
    with noted(tensor):
        data = shard.cut(tensor.detach()).contiguous()
    new = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    new.__dict__.update(tensor.__dict__)
    return new


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is cut by FSDP; without the second that importing DTensor takes."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that FSDP cuts, sharing its memory; any other as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def piece_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of a tensor that FSDP cuts: the dimension, over how many ranks, and which of the pieces is here."""
    mesh = tensor.device_mesh
    ((axis, cut),) = [(axis, each) for axis, each in enumerate(tensor.placements) if each.is_shard()]
    return cut.dim, mesh.size(axis), mesh.get_local_rank(axis)


def whole(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of a module, or its gradient, gathered over every rank that holds a piece."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()
    shard = shards_of(module).get(name)
    return shard.join(tensor) if shard is not None else tensor


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a scheduled model as that of the original: names and shapes; all ranks call it.

    A checkpoint of it loads into the unscheduled model, and the other way round by `load_full_state_dict`.
    """
    return {key: whole(*owner(module, key), value) for key, value in module.state_dict().items()}


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Loads the state of an unscheduled model into a scheduled one; each rank keeps its pieces."""
    pieces: dict[str, Any] = {}
    for key, value in state.items():
        holder, name = owner(module, key)
        shard = shards_of(holder).get(name)
        pieces[key] = shard.cut(value) if shard is not None else value
    mine = module.state_dict()
    for key, value in pieces.items():
        if is_dtensor(mine.get(key)):
            from torch.distributed.tensor import distribute_tensor

            pieces[key] = distribute_tensor(value, mine[key].device_mesh, mine[key].placements)
    module.load_state_dict(pieces)


def owner(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module and the name that a key of `state_dict` stands for."""
    path, _, name = key.rpartition(".")
    return root.get_submodule(path), name
