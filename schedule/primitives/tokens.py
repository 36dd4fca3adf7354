"""Primitives that divide the tokens of samples among ranks: sequences of a model, samples of a block."""

from ...base.errors import ScheduleError
from ...knobs.meaning import SequenceShards
from ..forward import add_layer, layers_of
from ..graph.called import check_called
from ..parallel.collectives import axis_of, neighbours
from ..parallel.exchange import syncs_of
from ..parallel.experts import spread_experts
from ..parallel.sequences import CutSequence, attend_together, axes_of, cut_sequence as cut, obstacle
from ..parallel.sharding import shards_of
from ..parallel.sharing import SharedSamples, sharing_axes
from ..tree import ScheduledModule, primitive
from .tensor_parallel import sharing_around, tensor_parallel


@primitive
def cut_sequence(sch: ScheduledModule, sp: int = 1, cp: int = 1) -> None:
    """Cuts every sequence over groups of `cp * sp` neighbours along the `dp` axis of the mesh, which then share
    samples.

    Each rank gets full samples and computes on its tokens. Around attention `sp` neighbours exchange tokens for heads
    (Ulysses), for any attention implementation of transformers; keys with fewer heads than ranks are repeated. Keys
    and values are passed around a ring of `cp` ranks (ring attention), each of which has two stretches of the
    sequence, from its beginning and from its end. The model's loss is that of this rank's tokens, scaled so that its mean
    over the axis is the loss of all samples: `shard_data` averages gradients accordingly. All ranks call it.

    Args:
        sp: number of ranks that exchange heads; it divides the heads.
        cp: number of ranks in a ring; `2 * cp` and `cp * sp` divide a sample's tokens.

    Raises:
        ScheduleError: not the root; no `dp` axis, or one that such groups do not divide; called before; a model with
            its own attention code, or in a ring with more than softmax(Q K') V; or heads that the ranks do not divide.

    Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509); Liu et al., Ring Attention (arXiv:2310.01889); both
    together: Fang and Zhao, USP (arXiv:2405.07719).
    """
    label = f"cut_sequence on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: sequences are cut for the whole model, so call it on the root's schedule")
    for name, degree in (("sp", sp), ("cp", cp)):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ScheduleError(f"{label}: {name} must be a whole number of at least 1, but is {degree!r}")
    dp = axis_of(sch.mesh, "dp")
    if sp * cp < 2 or dp is None or dp.size % (sp * cp):
        dp_ranks = "there is none" if dp is None else f"has {dp.size} ranks"
        raise ScheduleError(
            f"{label}: the mesh's dp axis must be of groups of cp * sp ranks, two or more, but {dp_ranks} and cp * sp is "
            f"{cp} * {sp}"
        )
    if layers_of(sch.module, CutSequence):
        raise ScheduleError(f"{label}: sequences are cut already")
    if sch.tree.shared:
        raise ScheduleError(f"{label}: it must come before share_samples")
    tp_axis = axis_of(sch.mesh, "tp")
    tp = 1 if tp_axis is None else tp_axis.size
    if reason := obstacle(sch.module, sp, cp, tp):
        raise ScheduleError(f"{'sp' if cp == 1 else 'cp' if sp == 1 else 'sp and cp'}: {reason}")
    axes = neighbours(sch.mesh, {"cp": cp, "sp": sp}, dp)
    sharing = SequenceShards(sp=sp, cp=cp, rank=dp.rank % (sp * cp))
    cut(sch.module, sharing, sp=axes.get("sp"), cp=axes.get("cp"), tp=tp)


@primitive
def share_samples(
    sch: ScheduledModule,
    tp: int = 1,
    enters: bool = True,
    leaves: bool = True,
    draws: bool = True,
) -> None:
    """Reduces the tensor-parallel degree of this module to `tp`; groups of `tp` ranks share the samples of a micro-batch.

    Later primitives on this module and those below it shard over `tp` neighbours of the mesh's `tp` axis. The groups
    compute different samples.

    Call it before `shard` and `sync` in this module; with `tp=1` nothing in it can be sharded. The first dimension of the
    module's first floating-point input must be samples. `shard_data` must follow on the root, because each rank's
    gradients are those of its samples only.

    Args:
        tp: ranks that shard the module's layers; a divisor of the size of the axis, and smaller.
        enters: the input has all samples; False if it comes from another such module with the same degree.
        leaves: the output has all samples; False if it goes to another such module with the same degree.
        draws: the module may draw random numbers, which must differ between the groups.

    Raises:
        ScheduleError: the root; no `tp` axis; an invalid degree; called before, or after `shard`, `sync` or
            `shard_experts` in this module.

    Source: Miao et al., Galvatron (arXiv:2211.13878).
    """
    label = f"share_samples on '{sch.name}'"
    if not sch.path:
        raise ScheduleError(f"{label}: samples are shared block by block; choose a smaller tp for the whole model")
    ranks = tensor_parallel(sch, "share_samples").size
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1 or ranks % tp or tp == ranks:
        raise ScheduleError(f"{label}: tp must divide the {ranks} ranks of the tp axis and be smaller, but is {tp!r}")
    if sharing_around(sch) is not None:
        raise ScheduleError(f"{label}: samples are shared once, and they already are")
    if spread_experts(sch.module) or any(
        shards_of(submodule) or syncs_of(submodule) for submodule in sch.module.modules()
    ):
        raise ScheduleError(
            f"{label}: its weights are cut over all ranks already; call it before shard, sync and shard_experts"
        )
    check_called(sch, "share_samples")
    # Blocks with equal degrees share their axes, because process groups take memory and must be created by all ranks.
    earlier = {sharing.sharers.size: sharing for sharing in sch.tree.shared.values()}.get(ranks // tp)
    sharing = earlier if earlier is not None else sharing_axes(sch.mesh, tp)
    sch.tree.shared[sch.path] = sharing
    add_layer(sch.module, SharedSamples(sharing, enters, leaves, draws))
    if layers_of(sch.tree.module, CutSequence):  # this rank has more heads of this module
        attend_together(sch.tree.module, sch.module, axes_of(sch.tree.module), tp)
