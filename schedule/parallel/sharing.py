"""Blocks that are sharded over fewer ranks than the mesh's `tp` axis has; groups of these ranks share the tokens.

| symbol | meaning |
|---|---|
| T, t | ranks of the `tp` axis; ranks among them that shard a block's layers |
| P | T / t: groups of t neighbours, each of which computes its share of the tokens of a micro-batch |
| s | groups that share a sequence: the samples are divided over P / s groups, and each sequence over s |

Between blocks sharded over all T ranks every rank has all tokens of a micro-batch (or of its sequence shard, if the model
shares sequences). Before a run of blocks of a smaller degree each rank selects its samples and its shards of their sequences
(the gradient is gathered); after the run the outputs are gathered (the gradient is cut). The gradients of the run's weights
are those of the group's tokens, so they are also summed over the P groups, together with the averaging over replicas.

Sequence shards are those of `SequenceShards`, also if they are cut from a shard: cutting the shard of a ring of C ranks for
a ring of c gives the shard of a ring of C c, and the same holds for contiguous chunks.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.2, on the layouts between layers of different strategies.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base._torch import tree_flatten, tree_unflatten
from ...base.errors import ScheduleError
from ...knobs.meaning import SequenceShards
from ...knobs.rules import sequence_refusal
from .. import collectives as differentiable
from ..forward import Inner, Layer, argument_names, layers_of, without_cache
from ..random_state import forked_streams
from . import collectives
from .collectives import Axis, through
from .ring_mask import RingMask


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """The axes of a block that is sharded over t of T ranks; None for one rank."""

    sharers: Axis
    """The P ranks that have the same shards of the block's weights, and different tokens."""
    samples: Axis | None
    """The sharers with the same sequence shard of different samples."""
    sequence: Axis | None
    """The sharers with the other sequence shards of the same samples."""
    shards: SequenceShards
    """This rank's sequence shard among those of `sequence`."""
    sp: Axis | None
    """The ranks that exchange heads in the block's attention: some of `sequence`, with those of the model's `cut_sequence`.
    None if the axis of the model does not change."""
    cp: Axis | None
    """The ranks of the block's ring, in the same way."""
    tp: Axis | None
    """The t ranks that shard the weights."""
    replicas: Axis
    """All ranks that have the same shards of the weights: the sharers in every replica."""

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Degrees of the block: tp, sp and cp, all along the mesh's `tp` axis."""
        return 1 if self.tp is None else self.tp.size, self.shards.sp, self.shards.cp


class SharedSamples(Layer):
    """Wraps a block: cuts its input to this rank's tokens, and gathers the outputs of all sharers."""

    order = 70

    def __init__(self, module: nn.Module, sharing: Sharing, enters: bool, leaves: bool, draws: bool) -> None:
        self.sharing = sharing
        self.enters, self.leaves = enters, leaves
        """True if the block's input (`enters`) or output (`leaves`) has all tokens; False if a neighbouring block shares
        them in the same way."""
        self.draws = draws
        """True if the block draws random numbers, which must differ between sharers."""
        self.names = argument_names(module)
        """Names of the block's arguments."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = without_cache(args, kwargs)
        names = [*self.names[: len(args)], *[""] * (len(args) - len(self.names)), *kwargs]
        flattened = [tree_flatten(argument) for argument in (*args, *kwargs.values())]
        hidden = next(
            leaf
            for leaves, _ in flattened
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )
        samples, tokens = self._sizes(hidden)
        shares = [
            tree_unflatten(
                [
                    leaf if leaf is hidden and not self.enters else self._share_of(name, leaf, samples, tokens)
                    for leaf in leaves
                ],
                spec,
            )
            for name, (leaves, spec) in zip(names, flattened, strict=True)
        ]
        kwargs = dict(zip(kwargs, shares[len(args) :], strict=True))
        with forked_streams(self.sharing.sharers) if self.draws and module.training else nullcontext():
            output = inner(*shares[: len(args)], **kwargs)
        return self._joined(output, samples // _size(self.sharing.samples), tokens // self.sharing.shards.ranks)

    def _sizes(self, hidden: torch.Tensor) -> tuple[int, int]:
        """Returns the number of samples of all sharers, and of tokens of a sample; 1 token if they do not share sequences."""
        sample_ranks, shards = _size(self.sharing.samples), self.sharing.shards
        samples = hidden.shape[0] * (1 if self.enters else sample_ranks)
        if samples % sample_ranks:
            raise ScheduleError(
                f"{sample_ranks} ranks share the samples of a block, so they must divide a micro-batch, which has {samples}"
            )
        if shards.ranks == 1:
            return samples, 1
        if hidden.dim() < 3:
            raise ScheduleError(
                f"ranks share the sequences of a block ({shards}), but its input of shape {tuple(hidden.shape)} has none"
            )
        tokens = hidden.shape[1] * (1 if self.enters else shards.ranks)
        if reason := sequence_refusal(tokens, shards.sp, shards.cp):
            raise ScheduleError(f"ranks share the sequences of a block: {reason}")
        return samples, tokens

    def _share_of(self, name: str, leaf: Any, samples: int, tokens: int) -> Any:
        """Returns this rank's share of an argument. A mask is only cut by samples: attention needs that of full sequences."""
        sharing = self.sharing
        if isinstance(leaf, RingMask):
            return leaf if sharing.samples is None else leaf.part(sharing.samples.rank, sharing.samples.size)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if sharing.samples is not None:
            if _of_samples(leaf, samples):
                leaf = differentiable.scatter(leaf, 0, sharing.samples)
            elif leaf.requires_grad:  # used by all ranks: its gradient is the sum over them
                leaf = differentiable.copy(leaf, sharing.samples)
        if sharing.sequence is not None:
            dim = None if "mask" in name else _tokens_of(name, leaf, tokens)
            if dim is not None:
                cut, join = self._exchange(dim, sharing.sequence)
                leaf = through(leaf, forward=cut, backward=join)
            elif leaf.requires_grad:
                leaf = differentiable.copy(leaf, sharing.sequence)
        return leaf

    def _exchange(self, dim: int, axis: Axis) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Returns the functions that cut a tensor to this rank's sequence shard, and that gather the shards."""
        cut = partial(self.sharing.shards.piece, dim=dim)
        return cut, partial(_join, dim=dim, shards=self.sharing.shards, axis=axis)

    def _joined(self, output: Any, samples: int, tokens: int) -> Any:
        leaves, spec = tree_flatten(output)
        before_first, sharing = True, self.sharing
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            is_first, before_first = before_first, False
            # Only the first output goes to the next block, which has the same shares; others leave the run of blocks.
            if is_first and not self.leaves:
                continue
            if sharing.sequence is not None and leaf.shape[:2] == (samples, tokens):
                cut, join = self._exchange(1, sharing.sequence)
                leaf = through(leaf, forward=join, backward=cut)
            if sharing.samples is not None and leaf.dim() and leaf.shape[0] == samples:
                leaf = differentiable.all_gather(leaf, 0, sharing.samples)
            leaves[index] = leaf
        return tree_unflatten(leaves, spec)


def _join(tensor: torch.Tensor, dim: int, shards: SequenceShards, axis: Axis) -> torch.Tensor:
    """Returns full sequences, gathered from the shards of all ranks, without gradient."""
    return shards.whole(collectives.all_gather(tensor, dim, axis), dim)


def _of_samples(leaf: torch.Tensor, samples: int) -> bool:
    """Returns True if an argument has an entry for each sample, such as a mask, positions or features.

    A two-dimensional table of floating-point numbers is shared by all samples."""
    if leaf.dim() < 2 or leaf.shape[0] != samples or samples == 1:
        return False
    return leaf.dim() > 2 or not leaf.is_floating_point()


def _tokens_of(name: str, leaf: torch.Tensor, tokens: int) -> int | None:
    """Returns the dimension of an argument that has an entry for each token, such as positions; None without one.

    Raises:
        ScheduleError: the dimension is not the one that positions and features have for tokens.
    """
    if leaf.dim() > 1 and leaf.shape[1] == tokens:
        return 1
    if leaf.dim() == 1 and leaf.shape[0] == tokens:
        return 0
    if leaf.dim() > 1 and tokens in leaf.shape:
        raise ScheduleError(
            f"ranks share the sequences of a block, but its argument '{name}' of shape {tuple(leaf.shape)} has the "
            f"{tokens} tokens of a sample elsewhere than in the second dimension; share samples instead"
        )
    return None


def sharing_of(module: nn.Module) -> Sharing | None:
    """Returns how ranks share the tokens of a block; None if all ranks share its layers."""
    return next((layer.sharing for layer in layers_of(module, SharedSamples)), None)


def shared_parameters(root: nn.Module) -> dict[nn.Parameter, Sharing]:
    """Returns the parameters below blocks whose tokens are shared, each with the sharing of its block."""
    return {
        param: sharing
        for module in root.modules()
        if (sharing := sharing_of(module)) is not None
        for param in module.parameters()
    }


def copies_with_parts(mesh: Any, ep: int, sharing: Sharing) -> Axis:
    """Returns the axis of the ranks that have the same experts of a block whose tokens are shared.

    They are the ranks of the `dp` axis that do not share the experts, times the sharers.
    """
    num_sharers, copies = sharing.sharers.size, _size_along(mesh, "dp") // ep
    splits = {
        "dp": {"copies": copies, "ep": ep},
        "tp": {"parts": num_sharers, "tp": _size_along(mesh, "tp") // num_sharers},
    }
    return collectives.joined(mesh, splits, ("copies", "parts"))


def sharing_axes(mesh: Any, tp: int, sp: int = 1, cp: int = 1, model_shards: SequenceShards | None = None) -> Sharing:
    """Returns the axes of blocks that are sharded over `tp` neighbours of the mesh's `tp` axis; all ranks call it.

    Args:
        sp, cp: numbers of groups of `tp` ranks that share sequences, by exchanging heads and in a ring.
        model_shards: how neighbours of the `dp` axis share all sequences of the model; None if they do not.
    """
    samples = _size_along(mesh, "tp") // (tp * sp * cp)
    model_shards = model_shards or SequenceShards()
    splits = {
        "dp": {"replicas": _size_along(mesh, "dp") // model_shards.ranks, "cp": model_shards.cp, "sp": model_shards.sp},
        "tp": {"samples": samples, "ring": cp, "heads": sp, "tp": tp},
    }
    sizes = {name: size for axis_sizes in splits.values() for name, size in axis_sizes.items()}

    # Several fields may need the same axis: its process groups are created once, on all ranks in the order of the calls.
    axes_by_names: dict[tuple[str, ...], Axis] = {}

    def along(*names: str) -> Axis | None:
        names_with_ranks = tuple(name for name in names if sizes[name] > 1)
        if names_with_ranks and names_with_ranks not in axes_by_names:
            axes_by_names[names_with_ranks] = collectives.joined(mesh, splits, names_with_ranks)
        return axes_by_names[names_with_ranks] if names_with_ranks else None

    sharers = along("samples", "ring", "heads")
    assert sharers is not None, "blocks are sharded over fewer ranks"
    return Sharing(
        sharers=sharers,
        samples=along("samples"),
        sequence=along("ring", "heads"),
        shards=SequenceShards(sp=sp, cp=cp, rank=sharers.rank % (sp * cp)),
        sp=along("sp", "heads") if sp > 1 else None,
        cp=along("cp", "ring") if cp > 1 else None,
        tp=along("tp"),
        replicas=along("replicas", "cp", "sp", "samples", "ring", "heads") or sharers,
    )


def _size(axis: Axis | None) -> int:
    return 1 if axis is None else axis.size


def _size_along(mesh: Any, name: str) -> int:
    return _size(collectives.axis_of(mesh, name))
