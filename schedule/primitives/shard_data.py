"""shard_data: data parallelism, with what each ZeRO stage cuts over the data-parallel ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ScheduleError
from ..collectives import Axis, axis_of
from ..registry import register_primitive
from ..schedule import Schedule


@register_primitive
def shard_data(sch: Schedule, zero: int = 0, blocks: str | None = None, gathered: Sequence[str] = ()) -> None:
    """Trains replicas on different data over the `dp` axis of the mesh; gradients are averaged.

    | zero | cut over the ranks | by |
    |---|---|---|
    | 0 | nothing | DistributedDataParallel |
    | 1 | optimizer state | the same, and ZeroRedundancyOptimizer |
    | 2 | and gradients; parameters until the forward | `fully_shard`, whole from forward to backward |
    | 3 | and parameters between forward and backward | `fully_shard`, cut again after the forward |

    Args:
        zero: the ZeRO stage, 0 to 3.
        blocks: pattern of the modules that are gathered one at a time at stages 2 and 3; by default the
            elements of the outermost module lists, and what remains together with the root.
        gathered: at stage 3, paths of those that stay whole from forward to backward, as at stage 2.

    Raises:
        ScheduleError: not the root; no `dp` axis; no such stage; called before; no such blocks. At `build`: stage
            2 or 3 in a pipeline whose stages hold tied weights.

    Source: Rajbhandari et al., ZeRO (2020); https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    label = f"shard_data on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: the whole model is replicated, so call it on the root's schedule")
    if axis_of(sch.mesh, "dp") is None:
        raise ScheduleError(
            f"{label}: the mesh must have an axis named dp; pass create_schedule(model, mesh=...)"
        )
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ScheduleError(f"{label}: zero must be a stage from 0 to 3, but got {zero!r}")
    if sch.deferred(_apply):
        raise ScheduleError(f"{label}: a model is replicated once, and it already is")
    if blocks is not None:
        sch.select(blocks)
    for path in gathered:
        sch[path]
    sch.defer("data", _apply, zero=zero, blocks=blocks, gathered=tuple(gathered))


def _apply(
    sch: Schedule,
    module: nn.Module,
    context: Any,
    zero: int,
    blocks: str | None,
    gathered: tuple[str, ...] = (),
) -> None:
    axis = axis_of(sch.mesh, "dp")
    if context.pipeline is not None:
        _replicate_stages(sch, module, context, axis, zero)
        return
    if zero <= 1:
        from torch.distributed._composable.replicate import replicate

        device = {"device_id": context.device} if context.device.type == "cuda" else {}
        replicate(module, process_group=axis.group, **device)
        if zero == 1 and context.optimizer is not None:
            context.optimizer = _redundancy_free(context.optimizer, axis.group)
        return
    from torch.distributed.fsdp import fully_shard

    mesh = sch.mesh["dp"]
    chosen = [each.module for each in sch.select(blocks)] if blocks else outermost_blocks(module)
    whole = {id(sch[path].module) for path in gathered}
    for each in [*chosen, module]:
        fully_shard(each, mesh=mesh, reshard_after_forward=zero == 3 and id(each) not in whole)


def _replicate_stages(sch: Schedule, module: nn.Module, context: Any, axis: Axis, zero: int) -> None:
    """Data parallelism around a pipeline: a stage's forward ends early, and hooks on the root do not run."""
    if zero >= 2:
        from torch.distributed.fsdp import fully_shard

        if context.pipeline.tied_within:
            raise ScheduleError(f"shard_data: {no_tied_stages(context.pipeline.tied_within)}")
        for unit in context.pipeline.units:
            if not context.pipeline.absent(unit.path) and any(True for _ in unit.module.parameters()):
                fully_shard(unit.module, mesh=sch.mesh["dp"], reshard_after_forward=zero == 3)
        return

    def average() -> None:
        for param in module.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=axis.group)
                param.grad.div_(axis.size)

    context.pipeline.after_step.append(average)
    if zero == 1 and context.optimizer is not None:
        context.optimizer = _redundancy_free(context.optimizer, axis.group)


def no_tied_stages(tied: str) -> str:
    """Why ZeRO 2 and 3 cannot be: each part of a stage is cut by itself, as nothing runs around them."""
    return (
        f"zero must be 0 or 1 in this pipeline, as one stage holds tied weights, {tied}, which are cut apart"
    )


def outermost_blocks(root: nn.Module) -> list[nn.Module]:
    """The elements of the module lists that are in no other module list."""
    if isinstance(root, nn.ModuleList):
        return list(root)
    return [block for child in root.children() for block in outermost_blocks(child)]


def _redundancy_free(make: Any, group: Any) -> Any:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # The class argument may be any function that makes an optimizer of parameter groups.
        return ZeroRedundancyOptimizer(params, optimizer_class=_from_groups(make), process_group=group)

    return optimizer


def _from_groups(make: Any) -> Any:
    def construct(groups: Any, **defaults: Any) -> torch.optim.Optimizer:
        return make(groups)

    return construct
