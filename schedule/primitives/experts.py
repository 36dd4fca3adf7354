"""The primitive that spreads experts over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ...base._torch import parameters_of
from ...base.errors import ScheduleError
from ..forward import add_layer
from ..graph.called import check_called
from ..parallel.checksums import NOTHING, checksum
from ..parallel.collectives import Axis, axis_of, neighbours
from ..parallel.experts import ExpertParallel, mixtures_of, num_experts, spread_experts, stacked_parameters
from ..parallel.sharding import Shard, cut_tensor, put, shards_of
from ..primitive import primitive
from ..tree import ScheduledModule
from .data_parallel import is_replicated


@primitive
def shard_experts(sch: ScheduledModule, ep: int, blocks: Sequence[str] | None = None) -> None:
    """Spreads the experts of every mixture over groups of `ep` neighbours along the `dp` axis of the mesh.

    Each rank holds and updates `1 / ep` of the experts, whole or cut over the `tp` axis before. Rows of tokens are
    sent to the ranks of their experts and back by two exchanges (all-to-all) in the forward pass and two in the
    backward pass. No row is dropped. Everything else is replicated as before, and a `shard_data` that follows averages
    the gradients of experts over the `dp / ep` ranks with the same ones. All ranks call it.

    Args:
        ep: ranks that share the experts; it divides the ranks of the axis and the experts of these mixtures.
        blocks: paths of the modules in which they are; None for the whole model.

    Raises:
        ScheduleError: not the root; no `dp` axis, or one that such groups do not divide; called before for one of these; no
            experts, or experts that the ranks do not divide; replicated before.

    Source: Lepikhin et al., GShard (arXiv:2006.16668).
    """
    label = f"shard_experts on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: experts are spread for the whole model, so call it on the root's schedule")
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 2:
        raise ScheduleError(f"{label}: ep must be a whole number of at least 2, but is {ep!r}")
    inside = [sch[path].module for path in blocks] if blocks is not None else [sch.module]
    if any(spread_experts(module) for module in inside):
        raise ScheduleError(f"{label}: experts are spread once, and they already are")
    found = {
        path: module
        for path, module in mixtures_of(sch.module).items()
        if any(module in set(each.modules()) for each in inside)
    }
    if why := _obstacle(found, ep):
        raise ScheduleError(f"ep: {why}")
    along = axis_of(sch.mesh, "dp")
    if along is None or along.size % ep:
        given = "there is none" if along is None else f"it has {along.size}"
        raise ScheduleError(f"{label}: {ep} must divide the ranks of the mesh's dp axis, but {given}")
    if is_replicated(sch):
        raise ScheduleError(f"{label}: replicas exchange the gradients of experts otherwise; call it before shard_data")
    for path in found:
        check_called(sch[path], "shard_experts")
    axes = neighbours(sch.mesh, {"ep": ep}, along, others="copies")
    for module in found.values():
        layer = ExpertParallel(axes["ep"], axes["copies"], num_experts(module))
        for name in stacked_parameters(module):
            _cut_stack(module, name, axes["ep"])
        add_layer(module, layer)
        module.num_experts = layer.experts // ep


def experts_obstacle(model: nn.Module, ep: int) -> str:
    """Why the experts of a model cannot be spread over so many ranks; empty where they can."""
    return _obstacle(mixtures_of(model), ep)


def _obstacle(found: Mapping[str, nn.Module], ep: int) -> str:
    if not found:
        return "the model has no experts that could be spread"
    for path, module in found.items():
        if num_experts(module) % ep:
            return f"{ep} ranks must divide the {num_experts(module)} experts of '{path}'"
        if any(cut.dim == 0 for cut in shards_of(module).values()):
            return f"the experts of '{path}' are cut over the tp axis already"
    return ""


def _cut_stack(module: nn.Module, name: str, axis: Axis) -> None:
    """Keeps a rank's part of a parameter that is stacked by expert, which may be cut over the `tp` axis already."""
    tensor, before = parameters_of(module)[name], shards_of(module).get(name)
    assert tensor is not None, f"{name} is not a parameter"
    cut = Shard(0, (tensor.shape[0],), tuple(tensor.shape), axis, checksum(tensor) if before is None else NOTHING)
    put(module, name, cut_tensor(tensor, cut))
    made = cut if before is None else replace(before, then=cut)
    module.__dict__["_shards"] = {**shards_of(module), name: made}
