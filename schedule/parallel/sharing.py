"""Blocks that are sharded over fewer ranks than the mesh's `tp` axis has; groups of these ranks share the samples.

| symbol | meaning |
|---|---|
| T, t | ranks of the `tp` axis; ranks among them that shard a block's layers |
| P | T / t: groups of t neighbours, each of which computes its share of the samples of a micro-batch |

Between blocks sharded over all T ranks every rank has all samples of a micro-batch. Before a run of blocks of a smaller degree
each rank selects its samples (the gradient is gathered); after the run the outputs are gathered (the gradient is cut). The
gradients of the run's weights are those of the group's samples, so they are also summed over the P groups, together with the
averaging over replicas.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.2, on the layouts between layers of different strategies.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base._torch import tree_flatten, tree_unflatten
from ...base.errors import ScheduleError
from .. import collectives as differentiable
from ..forward import Inner, Layer, layers_of, without_cache
from ..random_state import forked_streams
from . import collectives
from .collectives import Axis
from .ring_mask import RingMask


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """The axes of a block that is sharded over t of T ranks."""

    sharers: Axis
    """The P ranks that have the same shards of the block's weights, and different samples."""
    tp: Axis | None
    """The t ranks that shard the weights; None for one."""
    replicas: Axis
    """All ranks that have the same shards of the weights: the sharers in every replica."""


class SharedSamples(Layer):
    """Wraps a block: cuts its input to this rank's samples, and gathers the outputs of all sharers."""

    order = 70

    def __init__(self, sharing: Sharing, enters: bool, leaves: bool, draws: bool) -> None:
        self.sharing = sharing
        self.enters, self.leaves = enters, leaves
        """True if the block's input (`enters`) or output (`leaves`) has all samples; False if a neighbouring block shares
        them in the same way."""
        self.draws = draws
        """True if the block draws random numbers, which must differ between sharers."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten(without_cache(args, kwargs))
        hidden = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        sharers = self.sharing.sharers
        samples = hidden.shape[0] * (1 if self.enters else sharers.size)
        if samples % sharers.size:
            raise ScheduleError(
                f"{sharers.size} ranks share the samples of a block, so they must divide a micro-batch, which has {samples}"
            )
        shares = [leaf if leaf is hidden and not self.enters else self._share_of(leaf, samples) for leaf in leaves]
        args, kwargs = tree_unflatten(shares, spec)
        with forked_streams(sharers) if self.draws and module.training else nullcontext():
            output = inner(*args, **kwargs)
        return self._joined(output, samples // sharers.size)

    def _share_of(self, leaf: Any, samples: int) -> Any:
        """Returns this rank's share of an argument."""
        sharers = self.sharing.sharers
        if isinstance(leaf, RingMask):
            return leaf.part(sharers.rank, sharers.size)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if _of_samples(leaf, samples):
            return differentiable.scatter(leaf, 0, sharers)
        # Used by all ranks: its gradient is the sum over them.
        return differentiable.copy(leaf, sharers) if leaf.requires_grad else leaf

    def _joined(self, output: Any, samples: int) -> Any:
        leaves, spec = tree_flatten(output)
        before_first = True
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            is_first, before_first = before_first, False
            # Only the first output goes to the next block, which has the same shares; others leave the run of blocks.
            if is_first and not self.leaves:
                continue
            if leaf.dim() and leaf.shape[0] == samples:
                leaves[index] = differentiable.all_gather(leaf, 0, self.sharing.sharers)
        return tree_unflatten(leaves, spec)


def _of_samples(leaf: torch.Tensor, samples: int) -> bool:
    """Returns True if an argument has an entry for each sample, such as a mask, positions or features.

    A two-dimensional table of floating-point numbers is shared by all samples."""
    if leaf.dim() < 2 or leaf.shape[0] != samples or samples == 1:
        return False
    return leaf.dim() > 2 or not leaf.is_floating_point()


def sharing_of(module: nn.Module) -> Sharing | None:
    """Returns how ranks share the samples of a block; None if all ranks share its layers."""
    return next((layer.sharing for layer in layers_of(module, SharedSamples)), None)


def shared_parameters(root: nn.Module) -> dict[nn.Parameter, Sharing]:
    """Returns the parameters below blocks whose samples are shared, each with the sharing of its block."""
    return {
        param: sharing
        for module in root.modules()
        if (sharing := sharing_of(module)) is not None
        for param in module.parameters()
    }


def copies_with_parts(mesh: Any, ep: int, sharing: Sharing) -> Axis:
    """Returns the axis of the ranks that have the same experts of a block whose samples are shared.

    They are the ranks of the `dp` axis that do not share the experts, times the sharers.
    """
    num_sharers, copies = sharing.sharers.size, _size_along(mesh, "dp") // ep
    splits = {
        "dp": {"copies": copies, "ep": ep},
        "tp": {"parts": num_sharers, "tp": _size_along(mesh, "tp") // num_sharers},
    }
    return collectives.joined(mesh, splits, ("copies", "parts"))


def sharing_axes(mesh: Any, tp: int) -> Sharing:
    """Returns the axes of blocks that are sharded over `tp` neighbours of the mesh's `tp` axis; all ranks call it."""
    splits = {"tp": {"samples": _size_along(mesh, "tp") // tp, "tp": tp}}
    sharers = collectives.joined(mesh, splits, ("samples",))
    return Sharing(
        sharers=sharers,
        tp=collectives.joined(mesh, splits, ("tp",)) if tp > 1 else None,
        replicas=collectives.joined(mesh, splits, ("dp", "samples")) if _size_along(mesh, "dp") > 1 else sharers,
    )


def _size_along(mesh: Any, name: str) -> int:
    axis = collectives.axis_of(mesh, name)
    return 1 if axis is None else axis.size
