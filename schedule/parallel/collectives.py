"""Collectives over one axis of the mesh, and functions that apply them to values and gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...base._torch import functional_collectives, resolve_process_group, timeout_of
from ...base.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a device mesh, as plain data that is copied and pickled with the modules that use it."""

    name: str
    """`pp`, `dp`, `tp`, or a part of these, such as `sp`, `cp`, `ep`."""
    size: int
    """The number of ranks along the axis."""
    rank: int
    """This process's index along the axis."""
    group_name: str
    """The name of the process group in torch.distributed."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks along the axis."""
        return resolve_process_group(self.group_name)


# PyTorch 2.13 renamed both functions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def axis_of(mesh: Any, name: str) -> Axis | None:
    """Returns an axis of a mesh by name; None if the mesh is None or lacks the axis."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group(name)
    return Axis(name, group.size(), mesh.get_local_rank(name), group.group_name)


def subgroup(mesh: Any, lines: torch.Tensor, name: str) -> dist.ProcessGroup:
    """Returns this rank's process group among several, with the timeout of the groups of a mesh; None if it is in none.

    All ranks call it, and create all groups in the same order, as torch.distributed requires.

    Args:
        lines: global ranks, a row for each group.
    """
    timeout = timeout_of(mesh.get_group(mesh.mesh_dim_names[0]), torch.device(mesh.device_type))
    group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout, group_desc=f"mesh_{name}")
    return group


def divided(mesh: Any, name: str, sizes: Mapping[str, int]) -> Any:
    """Divides an axis of a mesh into a mesh of new axes, outermost first; ranks along the last are neighbours.

    All ranks call it.

    Args:
        sizes: sizes of the new axes by name; their product is the axis's size.
    """
    from torch.distributed.device_mesh import DeviceMesh

    blocks = mesh.mesh.movedim(mesh.mesh_dim_names.index(name), -1).reshape(-1, *sizes.values())
    groups = [
        subgroup(mesh, blocks.movedim(dim, -1).flatten(0, -2), new_name) for dim, new_name in enumerate(sizes, start=1)
    ]
    (own_block,) = (block for block in blocks if bool((block == dist.get_rank()).any()))
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=own_block, mesh_dim_names=tuple(sizes))


def neighbours(mesh: Any, degrees: Mapping[str, int], dp: Axis, others: str = "") -> dict[str, Axis]:
    """Returns the axes, of more than one rank, of groups of neighbours along the `dp` axis; all ranks call it.

    Args:
        degrees: sizes of these axes by name; ranks along the last are neighbours.
        others: a name for the axis of ranks that have the same position in each group. If given, this axis is returned
            too, even if its size is 1.
    """
    sizes = {name: size for name, size in degrees.items() if size > 1}
    splits = {"dp": {others or "samples": dp.size // prod(sizes.values()), **sizes}}
    return {name: joined(mesh, splits, (name,)) for name in (*([others] if others else []), *sizes)}


def joined(mesh: Any, splits: Mapping[str, Mapping[str, int]], names: Sequence[str]) -> Axis:
    """Returns one axis over the ranks that differ in several axes of a mesh, or in parts of these; all ranks call it.

    Args:
        mesh: the schedule's mesh.
        splits: the axes of the mesh to divide: names and sizes of the new axes, outermost first.
        names: the axes along which the ranks differ, outermost first; an axis that the mesh lacks has one rank.
    """
    planned = isinstance(mesh, PlannedMesh)
    sizes = mesh.axes if planned else dict(zip(mesh.mesh_dim_names, mesh.mesh.shape))
    shape: dict[str, int] = {}
    for name, size in sizes.items():
        shape |= splits.get(name, {name: size})
    axis_names = [name for name in names if name in shape]
    ranks = prod(shape[name] for name in axis_names)
    if planned:
        return Axis(names[-1], ranks, 0, "planned")
    rank_grid = mesh.mesh.reshape(list(shape.values()))
    position_by_name = {name: position for position, name in enumerate(shape)}
    other_dims = [position for name, position in position_by_name.items() if name not in axis_names]
    lines = rank_grid.permute([*other_dims, *(position_by_name[name] for name in axis_names)]).reshape(-1, ranks)
    group = subgroup(mesh, lines, "_".join(axis_names))
    return Axis(names[-1], ranks, dist.get_rank(group), group.group_name)


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Returns the sum over the axis, without gradient."""
    if tensor.is_meta:
        # Tracing and pipelines infer shapes on the meta device.
        return torch.empty_like(tensor)
    if torch.compiler.is_compiling():
        return _traceable("all_reduce", tensor.detach().contiguous(), "sum", axis.group_name)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Returns the ranks' tensors, concatenated along a dimension in rank order, without gradient."""
    piece = tensor.detach().movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        joined = _traceable("all_gather_into_tensor", piece, axis.size, axis.group_name)
        return joined.movedim(0, dim).contiguous()
    joined = piece.new_empty(piece.shape[0] * axis.size, *piece.shape[1:])
    if not piece.is_meta:
        _all_gather(joined, piece, group=axis.group)
    return joined if dim == 0 else joined.movedim(0, dim).contiguous()


def reduce_scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Returns this rank's shard, along a dimension, of the sum over the axis, without gradient.

    Raises:
        ScheduleError: the ranks do not divide the dimension.
    """
    check_divides("reduce_scatter", tensor, dim, axis)
    sums = tensor.detach().movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        piece = _traceable("reduce_scatter_tensor", sums, "sum", axis.size, axis.group_name)
        return piece.movedim(0, dim).contiguous()
    piece = sums.new_empty(sums.shape[0] // axis.size, *sums.shape[1:])
    if not sums.is_meta:
        _reduce_scatter(piece, sums, group=axis.group)
    return piece.movedim(0, dim).contiguous()


def check_divides(name: str, tensor: torch.Tensor, dim: int, axis: Axis) -> None:
    """Raises ScheduleError if the ranks do not divide a dimension."""
    if tensor.shape[dim] % axis.size:
        raise ScheduleError(f"{name}: {axis.size} ranks must divide dimension {dim}, but it is {tensor.shape[dim]}")


def all_to_all(tensor: torch.Tensor, dim: int, join: int, axis: Axis) -> torch.Tensor:
    """Sends one chunk along `dim` to each rank; returns the received chunks concatenated along `join`, without gradient."""
    # One contiguous tensor, chunk by chunk: `all_to_all_single` splits along the first dimension.
    chunks = torch.stack([chunk.movedim(dim, 0) for chunk in tensor.detach().chunk(axis.size, dim)])
    if torch.compiler.is_compiling():
        sizes = [1] * axis.size
        received = _traceable("all_to_all_single", chunks.contiguous(), sizes, sizes, axis.group_name)
    else:
        received = torch.empty_like(chunks, memory_format=torch.contiguous_format)
        if not chunks.is_meta:
            dist.all_to_all_single(received, chunks.contiguous(), group=axis.group)
    return torch.cat([chunk.movedim(0, dim) for chunk in received], join)


def all_to_all_rows(tensor: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> torch.Tensor:
    """Sends the first `sent[0]` rows to the first rank, the next `sent[1]` to the second, and so on, without gradient.

    Returns the received rows in rank order, `received[r]` of them from rank r."""
    rows = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(rows, tensor.detach().contiguous(), received, sent, group=axis.group)
    return rows


class RingTransfer:
    """An asynchronous send to the next rank of a ring, and receive of a tensor of the same shape from the previous rank.

    Args:
        tensor: the tensor to send; it must not change until `received` returns.
        axis: the ring.
        tag: distinguishes the kinds of tensors that are in flight at once.
    """

    def __init__(self, tensor: torch.Tensor, axis: Axis, tag: int = 0) -> None:
        self._outgoing = tensor.detach().contiguous()
        self._incoming = torch.empty_like(self._outgoing)
        group, next_rank, previous_rank = axis.group, (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        # Batched: with separate calls, ranks that all send first would deadlock on NCCL.
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._outgoing, group=group, tag=tag, group_peer=next_rank),
                dist.P2POp(dist.irecv, self._incoming, group=group, tag=tag, group_peer=previous_rank),
            ]
        )

    def received(self) -> torch.Tensor:
        """Waits for the send and the receive, and returns the received tensor."""
        for work in self._works:
            work.wait()
        return self._incoming


def _traceable(name: str, *args: Any) -> torch.Tensor:
    """Runs a collective that torch.compile can trace: process groups by name, results out of place."""
    return functional_collectives.wait_tensor(getattr(functional_collectives, name)(*args))


def scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Returns this rank's chunk, along a dimension, of a tensor that all ranks have, without gradient.

    Raises:
        ScheduleError: the ranks do not divide the dimension.
    """
    check_divides("scatter", tensor, dim, axis)
    return tensor.chunk(axis.size, dim)[axis.rank].contiguous()


Operation = Callable[[torch.Tensor], torch.Tensor]


class _Through(torch.autograd.Function):
    """Applies one function to the value and another to the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Operation | None, backward: Operation | None) -> Any:
        ctx.backward_operation = backward
        return forward(tensor) if forward is not None else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        operation = ctx.backward_operation
        return (operation(grads[0]) if operation is not None else grads[0]), None, None


def through(tensor: torch.Tensor, forward: Operation | None = None, backward: Operation | None = None) -> torch.Tensor:
    """Applies `forward` to a tensor and `backward` to its gradient; None leaves either unchanged."""
    return _Through.apply(tensor, forward, backward)


@dataclass(frozen=True, slots=True)
class _Group:
    count: int
    group_name: str = "planned"

    def size(self) -> int:
        return self.count


class PlannedMesh:
    """A substitute for a DeviceMesh, without processes, on its first rank: `PlannedMesh(pp=2, tp=4)`.

    Primitives that only read and check the sizes of axes accept it; `build` does not.
    """

    def __init__(self, **axes: int) -> None:
        self.axes = axes
        self.mesh_dim_names = tuple(axes)

    def get_group(self, name: str) -> _Group:
        """Returns an object with the size of the axis."""
        return _Group(self.axes[name])

    def get_local_rank(self, name: str) -> int:
        """Returns 0, the first rank."""
        return 0
