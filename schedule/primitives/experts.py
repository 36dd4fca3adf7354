"""Primitives of mixtures of experts: experts spread over ranks, and their capacity."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from torch import nn

from ...base._torch import parameters_of
from ...base.errors import ScheduleError
from ..forward import add_layer, layers_of
from ..graph.called import check_called
from ..parallel.collectives import Axis, axis_of, joined, neighbours
from ..parallel.experts import (
    DividedTokens,
    ExpertCapacity,
    ExpertParallel,
    mixtures_of,
    num_experts,
    spread_experts,
    stacked_parameters,
)
from ..parallel.sharding import NOTHING, Shard, checksum, cut_tensor, shards_of
from ..parallel.sharing import copies_with_parts
from ..tree import ScheduledModule, primitive, replace_tensor
from .data_parallel import is_replicated
from .tensor_parallel import sharing_around


@primitive
def shard_experts(sch: ScheduledModule, ep: int, whole: bool = False, divided: bool = False) -> None:
    """Spreads the experts of every mixture over groups of `ep` neighbours along the `dp` axis of the mesh.

    Each rank stores and updates `1 / ep` of the experts, each of which may be cut over the `tp` axis. Rows of tokens are
    sent to the ranks of their experts and back by two all-to-all exchanges in the forward pass and two in the backward
    pass. No row is dropped. All other modules are replicated, and a later `shard_data` averages the gradients of experts
    over the `dp / ep` ranks with the same experts. All ranks call it.

    With `whole`, experts are not cut over the `tp` axis. Its ranks compute different tokens, and groups are of `ep`
    neighbours along the `tp` and `dp` axes together.

    Args:
        ep: number of ranks that share the experts; it divides the ranks of the axis and the experts of each mixture.
            With `whole` it may be 1, and divides the ranks of the `tp` axis or is a multiple of their number.
        whole: do not cut experts over the `tp` axis; call it before `shard`.
        divided: with `whole`, the ranks of the `tp` axis have different tokens already, for example of a cut sequence.

    Raises:
        ScheduleError: not the root; the mesh has no such axis, or groups of `ep` do not divide it; called before; there are
            no experts, or `ep` does not divide them; called after `shard_data`; or `whole` for experts that are cut, or that
            are in blocks that share samples.

    Source: Lepikhin et al., GShard (arXiv:2006.16668).
    """
    label = f"shard_experts on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: experts are spread for the whole model, so call it on the root's schedule")
    smallest = 1 if whole else 2
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < smallest:
        raise ScheduleError(f"{label}: ep must be a whole number of at least {smallest}, but is {ep!r}")
    if spread_experts(sch.module):
        raise ScheduleError(f"{label}: experts are spread once, and they already are")
    mixtures = mixtures_of(sch.module)
    if reason := _obstacle(mixtures, ep, whole):
        raise ScheduleError(f"ep: {reason}")
    dp, tp = axis_of(sch.mesh, "dp"), axis_of(sch.mesh, "tp")
    if whole:
        _check_whole(label, ep, dp, tp)
    elif dp is None or dp.size % ep:
        dp_ranks = "there is none" if dp is None else f"it has {dp.size}"
        raise ScheduleError(f"{label}: {ep} must divide the ranks of the mesh's dp axis, but {dp_ranks}")
    if is_replicated(sch):
        raise ScheduleError(f"{label}: replicas exchange the gradients of experts otherwise; call it before shard_data")
    for path in mixtures:
        check_called(sch[path], "shard_experts")
    sharings = {path: sharing_around(sch[path]) for path in mixtures}
    if whole and any(sharings.values()):
        raise ScheduleError(f"{label}: whole experts are on the ranks of the tp axis, but share_samples divides these")
    sharers, copies = _axes(sch.mesh, ep, dp, tp if whole else None)
    # Creating process groups is collective. Every rank still has all blocks; later those of its pipeline stages only.
    copies_by_sharers = {
        sharing.sharers.size: copies_with_parts(sch.mesh, ep, sharing)
        for sharing in sharings.values()
        if sharing is not None
    }
    for path, module in mixtures.items():
        sharing = sharings[path]
        expert_copies = copies if sharing is None else copies_by_sharers[sharing.sharers.size]
        layer = ExpertParallel(sharers, expert_copies, num_experts(module))
        for name in stacked_parameters(module) if ep > 1 else ():
            _cut_stack(module, name, sharers)
        add_layer(module, layer)
        if whole and tp is not None and not divided:
            add_layer(module, DividedTokens(tp))
        module.num_experts = layer.experts // ep  # the module's own code loops over this rank's experts


def _check_whole(label: str, ep: int, dp: Axis | None, tp: Axis | None) -> None:
    """Raises ScheduleError if groups of `ep` neighbours along both axes do not fit into them."""
    if tp is None:
        raise ScheduleError(f"{label}: experts are whole beside the mesh's tp axis, but there is none")
    tp_ranks, ranks = tp.size, tp.size * (1 if dp is None else dp.size)
    if ranks % ep or (tp_ranks % ep and ep % tp_ranks):
        raise ScheduleError(
            f"{label}: ep must divide the {tp_ranks} ranks of the tp axis, or be a multiple of them that divides the "
            f"{ranks} ranks of the tp and dp axes, but is {ep}"
        )


def _axes(mesh: Any, ep: int, dp: Axis | None, tp: Axis | None) -> tuple[Axis, Axis]:
    """Returns the ranks that share experts, and those that have the same; all ranks call it.

    Args:
        tp: the `tp` axis if its ranks share experts too, or None.
    """
    if tp is None:
        assert dp is not None, "shard_experts checks that an axis exists"
        axes = neighbours(mesh, {"ep": ep}, dp, others="copies")
        return axes["ep"], axes["copies"]
    ep_of_tp = min(ep, tp.size)
    ep_of_dp, replicas = ep // ep_of_tp, 1 if dp is None else dp.size
    splits = {
        "tp": {"copies": tp.size // ep_of_tp, "ep": ep_of_tp},
        "dp": {"copies of replicas": replicas // ep_of_dp, "ep of replicas": ep_of_dp},
    }
    return joined(mesh, splits, ("ep of replicas", "ep")), joined(mesh, splits, ("copies of replicas", "copies"))


@primitive
def limit_experts(sch: ScheduledModule, capacity_factor: float) -> None:
    """Drops the rows of tokens beyond the capacity of their expert, in training, for every mixture in this module.

    An expert computes `ceil(capacity_factor * tokens * chosen / experts)` rows of the tokens of each rank in a forward pass,
    where each token has `chosen` experts. It keeps the rows with the largest router weights; a dropped row adds nothing to
    its token. Experts with fewer rows compute zeros, so that ranks that share experts exchange equal sizes and need not
    send these first. Results depend on which tokens a forward pass has, so the trained model differs from one without a
    limit.

    Args:
        capacity_factor: capacity relative to the mean number of rows of an expert, above 0.

    Raises:
        ScheduleError: not a positive number; no experts in this module; or called before for one of these.

    Source: Lepikhin et al., GShard (arXiv:2006.16668); Megatron-LM's `--moe-expert-capacity-factor`.
    """
    label = f"limit_experts on '{sch.name}'"
    if (
        isinstance(capacity_factor, bool)
        or not isinstance(capacity_factor, int | float)
        or not 0 < capacity_factor < inf
    ):
        raise ScheduleError(f"{label}: capacity_factor must be a number above 0, but is {capacity_factor!r}")
    mixtures = mixtures_of(sch.module)
    if not mixtures:
        raise ScheduleError(f"{label}: it has no experts whose rows could be limited")
    if any(layers_of(module, ExpertCapacity) for module in mixtures.values()):
        raise ScheduleError(f"{label}: experts have one capacity, and they have one already")
    for path, module in mixtures.items():
        check_called(sch[path] if path else sch, "limit_experts")
        add_layer(module, ExpertCapacity(capacity_factor, num_experts(module)))


def _obstacle(mixtures: Mapping[str, nn.Module], ep: int, whole: bool) -> str | None:
    """Returns why these experts cannot be spread over `ep` ranks; None if they can."""
    if not mixtures:
        return "the model has no experts that could be spread"
    for path, module in mixtures.items():
        if num_experts(module) % ep:
            return f"{ep} ranks must divide the {num_experts(module)} experts of '{path}'"
        if any(whole or shard.dim == 0 for shard in shards_of(module).values()):
            return f"the experts of '{path}' are cut over the tp axis already"
    return None


def _cut_stack(module: nn.Module, name: str, axis: Axis) -> None:
    """Replaces a parameter that is stacked by expert, and may be cut over the `tp` axis, by this rank's experts."""
    tensor, earlier = parameters_of(module)[name], shards_of(module).get(name)
    assert tensor is not None, f"{name} is not a parameter"
    shard = Shard(0, (tensor.shape[0],), tuple(tensor.shape), axis, checksum(tensor) if earlier is None else NOTHING)
    replace_tensor(module, name, cut_tensor(tensor, shard))
    chained = shard if earlier is None else replace(earlier, then=shard)
    module.__dict__["_shards"] = {**shards_of(module), name: chained}
