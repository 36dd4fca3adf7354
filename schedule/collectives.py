"""Differentiable collectives, for the user's own modules.

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
    """Returns an axis of a device mesh for the functions below; it is plain data that a module can store.

    Raises:
        ScheduleError: the mesh has no axis of this name.
    """
    named_axis = axis_of(mesh, name)
    if named_axis is None:
        raise ScheduleError(f"collectives: {unknown('axis', name, getattr(mesh, 'mesh_dim_names', None) or ())}")
    return named_axis


def copy(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Returns the tensor unchanged, for different computations on each rank: its gradient is summed over them."""
    return through(tensor, backward=partial(collectives.all_reduce, axis=axis))


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums over the ranks; the gradient passes unchanged, since all ranks continue with the same computation."""
    return through(tensor, forward=partial(collectives.all_reduce, axis=axis))


def all_gather(tensor: torch.Tensor, dim: int, axis: Axis, gradient: str = "scatter") -> torch.Tensor:
    """Concatenates the ranks' tensors along a dimension, in the order of ranks.

    Args:
        gradient: `scatter` takes this rank's piece of it, if all ranks continue with the same computation;
            `reduce_scatter` sums the pieces of all ranks, if their computations differ.

    Raises:
        ScheduleError: unknown gradient.
    """
    gradients = {"scatter": collectives.scatter, "reduce_scatter": collectives.reduce_scatter}
    if gradient not in gradients:
        raise ScheduleError(f"all_gather: {unknown('gradient', gradient, gradients)}")
    forward = partial(collectives.all_gather, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(gradients[gradient], dim=dim, axis=axis))


def reduce_scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's piece along a dimension of the sum over the ranks; its gradient is gathered."""
    forward = partial(collectives.reduce_scatter, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_gather, dim=dim, axis=axis))


def scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's piece along a dimension of a replicated tensor; its gradient is gathered."""
    forward = partial(collectives.scatter, dim=dim, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_gather, dim=dim, axis=axis))


def all_to_all(tensor: torch.Tensor, dim: int, join: int, axis: Axis) -> torch.Tensor:
    """Cuts a tensor along one dimension, sends a piece to each rank, and concatenates the received pieces along
    another.

    It exchanges sequences for heads and back (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509). The gradient takes
    the inverse path.

    Raises:
        ScheduleError: the ranks do not divide the dimension.
    """
    collectives.check_divides("all_to_all", tensor, dim, axis)
    forward = partial(collectives.all_to_all, dim=dim, join=join, axis=axis)
    return through(tensor, forward=forward, backward=partial(collectives.all_to_all, dim=join, join=dim, axis=axis))
