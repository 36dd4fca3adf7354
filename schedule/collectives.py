"""Collectives that gradients pass through, for modules of one's own.

Each takes the axis of the mesh: `axis = rl.collectives.axis(mesh, "tp")`.
"""

from functools import partial
from typing import Any

import torch

from ..base.errors import ScheduleError, unknown
from .parallel import collectives
from .parallel.collectives import Axis, axis_of, through

__all__ = ["all_gather", "all_reduce", "all_to_all", "axis", "copy", "reduce_scatter", "scatter"]


def axis(mesh: Any, name: str = "tp") -> Axis:
    """One axis of a device mesh, as the functions below take it; plain data, which a module can keep.

    Raises:
        ScheduleError: the mesh has none of this name.
    """
    found = axis_of(mesh, name)
    if found is None:
        raise ScheduleError(f"collectives: {unknown('axis', name, getattr(mesh, 'mesh_dim_names', None) or ())}")
    return found


def copy(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tensor as it is, where ranks go on with different work: its gradient is summed over them."""
    return through(tensor, backward=partial(collectives.all_reduce, axis=axis))


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the ranks; its gradient passes as it is, since all go on with the same."""
    return through(tensor, forward=partial(collectives.all_reduce, axis=axis))


def all_gather(tensor: torch.Tensor, dim: int, axis: Axis, gradient: str = "scatter") -> torch.Tensor:
    """The ranks' tensors joined along a dimension, in the order of ranks.

    Args:
        tensor: this rank's.
        dim: the dimension.
        axis: the ranks.
        gradient: `scatter` takes this rank's piece of it, where all ranks go on with the same; `reduce_scatter` sums
            the pieces that all ranks have of it, where they go on with different work.

    Raises:
        ScheduleError: another gradient.
    """
    ways = {"scatter": collectives.scatter, "reduce_scatter": collectives.reduce_scatter}
    if gradient not in ways:
        raise ScheduleError(f"all_gather: {unknown('gradient', gradient, ways)}")
    forward = partial(collectives.all_gather, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(ways[gradient], dim=dim, axis=axis))


def reduce_scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's piece along a dimension of the sum over the ranks; its gradient is gathered."""
    forward = partial(collectives.reduce_scatter, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_gather, dim=dim, axis=axis))


def scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's piece along a dimension of what all have; its gradient is gathered."""
    forward = partial(collectives.scatter, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_gather, dim=dim, axis=axis))


def all_to_all(tensor: torch.Tensor, dim: int, join: int, axis: Axis) -> torch.Tensor:
    """Cuts a tensor along one dimension, a piece to each rank, and joins what comes from the ranks along another.

    Sequences become heads that way, and heads sequences (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509). The
    gradient goes the way back.

    Raises:
        ScheduleError: the ranks do not divide the dimension.
    """
    if tensor.shape[dim] % axis.size:
        raise ScheduleError(f"all_to_all: {axis.size} ranks must divide dimension {dim}, but it is {tensor.shape[dim]}")
    forward = partial(collectives.all_to_all, dim=dim, join=join, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_to_all, dim=join, join=dim, axis=axis))
