"""The primitives of mixtures: experts spread over ranks, and their capacity."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from torch import nn

from ...base._torch import parameters_of
from ...base.errors import ScheduleError
from ..forward import add_layer, layers_of
from ..graph.called import check_called
from ..held import replace_tensor
from ..parallel.checksums import NOTHING, checksum
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
from ..parallel.sharding import Shard, cut_tensor, shards_of
from ..parallel.sharing import copies_with_parts
from ..primitive import primitive
from ..tree import ScheduledModule
from .data_parallel import is_replicated
from .tensor_parallel import sharing_around


@primitive
def shard_experts(
    sch: ScheduledModule, ep: int, blocks: Sequence[str] | None = None, whole: bool = False, divided: bool = False
) -> None:
    """Spreads the experts of every mixture over groups of `ep` neighbours along the `dp` axis of the mesh.

    Each rank holds and updates `1 / ep` of the experts, whole or cut over the `tp` axis before. Rows of tokens are
    sent to the ranks of their experts and back by two exchanges (all-to-all) in the forward pass and two in the
    backward pass. No row is dropped. Everything else is replicated as before, and a `shard_data` that follows averages
    the gradients of experts over the `dp / ep` ranks with the same ones. All ranks call it.

    With `whole`, experts are not cut over the `tp` axis. Its ranks compute a part of the tokens each, and groups are of `ep`
    neighbours along the `tp` and `dp` axes together.

    Args:
        ep: ranks that share the experts; it divides the ranks of the axis and the experts of these mixtures. With `whole`
            it may be 1, and divides the ranks of the `tp` axis or is a multiple of their number.
        blocks: paths of the modules in which they are; None for the whole model.
        whole: experts are whole, one after the other on ranks of the `tp` axis; call it before `shard`.
        divided: with `whole`, the ranks of the `tp` axis have different tokens already, as a cut sequence.

    Raises:
        ScheduleError: not the root; no such axis, or one that such groups do not divide; called before for one of these; no
            experts, or experts that the ranks do not divide; replicated before; whole experts that are cut, or in
            blocks that share samples.

    Source: Lepikhin et al., GShard (arXiv:2006.16668).
    """
    label = f"shard_experts on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: experts are spread for the whole model, so call it on the root's schedule")
    least = 1 if whole else 2
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < least:
        raise ScheduleError(f"{label}: ep must be a whole number of at least {least}, but is {ep!r}")
    inside = [sch[path].module for path in blocks] if blocks is not None else [sch.module]
    if any(spread_experts(module) for module in inside):
        raise ScheduleError(f"{label}: experts are spread once, and they already are")
    found = {
        path: module
        for path, module in mixtures_of(sch.module).items()
        if any(module in set(each.modules()) for each in inside)
    }
    if reason := _obstacle(found, ep, whole):
        raise ScheduleError(f"ep: {reason}")
    along, layers = axis_of(sch.mesh, "dp"), axis_of(sch.mesh, "tp")
    if whole:
        _check_whole(label, ep, along, layers)
    elif along is None or along.size % ep:
        given = "there is none" if along is None else f"it has {along.size}"
        raise ScheduleError(f"{label}: {ep} must divide the ranks of the mesh's dp axis, but {given}")
    if is_replicated(sch):
        raise ScheduleError(f"{label}: replicas exchange the gradients of experts otherwise; call it before shard_data")
    for path in found:
        check_called(sch[path], "shard_experts")
    sharings = {path: sharing_around(sch[path]) for path in found}
    if whole and any(sharings.values()):
        raise ScheduleError(f"{label}: whole experts are on the ranks of the tp axis, but share_samples divides these")
    sharers, copies = _axes(sch.mesh, ep, along, layers if whole else None)
    # Made while every rank has all blocks: a rank of a pipeline has only those of its stages later.
    apart = {each.parts.size: copies_with_parts(sch.mesh, ep, each) for each in sharings.values() if each is not None}
    for path, module in found.items():
        sharing = sharings[path]
        layer = ExpertParallel(sharers, copies if sharing is None else apart[sharing.parts.size], num_experts(module))
        for name in stacked_parameters(module) if ep > 1 else ():
            _cut_stack(module, name, sharers)
        add_layer(module, layer)
        if whole and layers is not None and not divided:
            add_layer(module, DividedTokens(layers))
        module.num_experts = layer.experts // ep


def _check_whole(label: str, ep: int, along: Axis | None, layers: Axis | None) -> None:
    """Raises ScheduleError if groups of `ep` neighbours along both axes do not fit into them."""
    if layers is None:
        raise ScheduleError(f"{label}: experts are whole beside the mesh's tp axis, but there is none")
    tp, ranks = layers.size, layers.size * (1 if along is None else along.size)
    if ranks % ep or (tp % ep and ep % tp):
        raise ScheduleError(
            f"{label}: ep must divide the {tp} ranks of the tp axis, or be a multiple of them that divides the {ranks} ranks of "
            f"the tp and dp axes, but is {ep}"
        )


def _axes(mesh: Any, ep: int, along: Axis | None, layers: Axis | None) -> tuple[Axis, Axis]:
    """Returns the ranks that share experts, and those that have the same; all ranks call it.

    `layers` is the `tp` axis if its ranks share experts too."""
    if layers is None:
        assert along is not None, "checked"
        made = neighbours(mesh, {"ep": ep}, along, others="copies")
        return made["ep"], made["copies"]
    near = min(ep, layers.size)
    far, replicas = ep // near, 1 if along is None else along.size
    splits = {
        "tp": {"copies": layers.size // near, "ep": near},
        "dp": {"copies of replicas": replicas // far, "ep of replicas": far},
    }
    return joined(mesh, splits, ("ep of replicas", "ep")), joined(mesh, splits, ("copies of replicas", "copies"))


@primitive
def limit_experts(sch: ScheduledModule, capacity_factor: float) -> None:
    """Drops the rows of tokens beyond the capacity of their expert, in training, for every mixture in this module.

    An expert computes `ceil(capacity_factor * tokens * chosen / experts)` rows of the tokens of each rank in a forward pass,
    `chosen` experts being those of a token. It keeps the rows with the largest router weights; a dropped one adds nothing to
    its token. Experts with fewer rows compute zeros, so that ranks that share experts exchange equal sizes without asking for
    them. Results depend on which tokens a forward pass has, so this trains another model than without.

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
    found = mixtures_of(sch.module)
    if not found:
        raise ScheduleError(f"{label}: it has no experts whose rows could be limited")
    if any(layers_of(module, ExpertCapacity) for module in found.values()):
        raise ScheduleError(f"{label}: experts have one capacity, and they have one already")
    for path, module in found.items():
        check_called(sch[path] if path else sch, "limit_experts")
        add_layer(module, ExpertCapacity(capacity_factor, num_experts(module)))


def _obstacle(found: Mapping[str, nn.Module], ep: int, whole: bool) -> str:
    if not found:
        return "the model has no experts that could be spread"
    for path, module in found.items():
        if num_experts(module) % ep:
            return f"{ep} ranks must divide the {num_experts(module)} experts of '{path}'"
        if any(whole or cut.dim == 0 for cut in shards_of(module).values()):
            return f"the experts of '{path}' are cut over the tp axis already"
    return ""


def _cut_stack(module: nn.Module, name: str, axis: Axis) -> None:
    """Keeps a rank's part of a parameter that is stacked by expert, which may be cut over the `tp` axis already."""
    tensor, before = parameters_of(module)[name], shards_of(module).get(name)
    assert tensor is not None, f"{name} is not a parameter"
    cut = Shard(0, (tensor.shape[0],), tuple(tensor.shape), axis, checksum(tensor) if before is None else NOTHING)
    replace_tensor(module, name, cut_tensor(tensor, cut))
    made = cut if before is None else replace(before, then=cut)
    module.__dict__["_shards"] = {**shards_of(module), name: made}
