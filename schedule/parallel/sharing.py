"""Blocks that are sharded over fewer ranks than the mesh's `tp` axis has: the other ranks share their samples instead.

| symbol | meaning |
|---|---|
| T, t | ranks of the `tp` axis; ranks among them that share a block's layers |
| P | T / t: parts of the samples of a micro-batch, each computed by t neighbours |

Between blocks sharded over all T ranks every rank has all samples of a micro-batch. Before a run of blocks of a smaller
degree each rank keeps its part of the samples (the gradient is gathered); after the run the parts are gathered (the
gradient is cut). The gradients of the run's weights are those of a part of the samples, so they are summed over the P
parts too, together with the averaging over replicas.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.2, on the layouts between layers of different strategies.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base._torch import tree_flatten, tree_unflatten
from ...base.errors import ScheduleError
from .. import collectives as differentiable
from ..forward import Layer, layers_of
from ..outputs import without_cache
from . import collectives
from .collectives import Axis
from .streams import forked_streams


@dataclass(frozen=True, slots=True)
class Sharing:
    """The axes of a block that is sharded over t of T ranks."""

    parts: Axis
    """The P ranks that have the same piece of the block's weights and one part of the samples each."""
    tp: Axis | None
    """The t ranks that share the weights; None for one."""
    replicas: Axis
    """All ranks that have the same piece of the weights: the P parts in every replica."""


class SharedSamples(Layer):
    """Wraps a block: cuts the samples to this rank's part, and gathers the outputs of all parts."""

    order = 70

    def __init__(self, sharing: Sharing, enters: bool, leaves: bool, draws: bool) -> None:
        self.sharing = sharing
        self.enters, self.leaves = enters, leaves
        """True if the block's input (`enters`) or output (`leaves`) has all samples; False if a neighbouring block shares
        the same parts."""
        self.draws = draws
        """True if the block draws random numbers, which differ between parts."""

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        parts = self.sharing.parts
        args, kwargs = without_cache(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        first = next(
            at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )
        samples = leaves[first].shape[0] * (1 if self.enters else parts.size)
        if samples % parts.size:
            raise ScheduleError(
                f"{parts.size} ranks share the samples of a block, so they must divide a micro-batch, which has {samples}"
            )
        for at, leaf in enumerate(leaves):
            if at == first and not self.enters:
                continue
            if at == first or _of_samples(leaf, samples):
                leaves[at] = differentiable.scatter(leaf, 0, parts)
            elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaves[at] = differentiable.copy(leaf, parts)
        args, kwargs = tree_unflatten(leaves, spec)
        with forked_streams(parts) if self.draws and module.training else nullcontext():
            output = inner(*args, **kwargs)
        return self._joined(output, samples // parts.size)

    def _joined(self, output: Any, samples: int) -> Any:
        leaves, spec = tree_flatten(output)
        waiting = True
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            first, waiting = waiting, False
            if leaf.dim() and leaf.shape[0] == samples and (self.leaves or not first):
                leaves[at] = differentiable.all_gather(leaf, 0, self.sharing.parts)
        return tree_unflatten(leaves, spec)


def _of_samples(leaf: Any, samples: int) -> bool:
    """Returns True if an argument has an entry for each sample, such as a mask, positions or features.

    A two-dimensional table of floating-point numbers is shared by all samples."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.shape[0] != samples or samples == 1:
        return False
    return leaf.dim() > 2 or not leaf.is_floating_point()


def sharing_of(module: nn.Module) -> Sharing | None:
    """Returns how ranks share the samples of a block; None if all ranks share its layers."""
    return next((each.sharing for each in layers_of(module, SharedSamples)), None)


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

    They are the ranks of the `dp` axis that do not share the experts, times the parts."""
    parts, copies = sharing.parts.size, _size(mesh, "dp") // ep
    splits = {"dp": {"copies": copies, "ep": ep}, "tp": {"parts": parts, "tp": _size(mesh, "tp") // parts}}
    return collectives.joined(mesh, splits, ("copies", "parts"))


def sharing_axes(mesh: Any, tp: int) -> Sharing:
    """Returns the axes of blocks that are sharded over `tp` neighbours of the mesh's `tp` axis; all ranks call it."""
    parts = _size(mesh, "tp") // tp
    splits = {"tp": {"parts": parts, "tp": tp}}
    return Sharing(
        parts=collectives.joined(mesh, splits, ("parts",)),
        tp=collectives.joined(mesh, splits, ("tp",)) if tp > 1 else None,
        replicas=collectives.joined(mesh, splits, ("dp", "parts")),
    )


def _size(mesh: Any, name: str) -> int:
    found = collectives.axis_of(mesh, name)
    return 1 if found is None else found.size
