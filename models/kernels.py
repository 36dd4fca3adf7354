"""The knob `kernels`: decides if the loss can avoid materialising a workload's logits, and if that pays."""

from typing import TYPE_CHECKING, Any

from ..base.errors import ScheduleError, WorkloadError
from .batches import make_batch
from .families import generic_schedule
from .families.standard import StandardSchedule, head_of
from .skeleton import UNABLE, fake_pass, skeleton
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn

    from ..schedule import Schedule

LARGE_HEAD = 4
"""Logits per token and feature from which they matter: a feed-forward part has as many numbers."""
_LOOKED_AT = 2
"""Blocks of a list that run to observe the loss: the first may differ from the rest."""


def kernels_obstacle(workload: Workload, sch: "Schedule | None" = None) -> str | None:
    """Reason why a workload's space lacks `kernels`; None if it has it.

    Args:
        workload: with its own schedule, or a StandardSchedule.
        sch: a schedule of its skeleton, if there is one.
    """
    from ..schedule import create_schedule

    schedule = workload.schedule or generic_schedule
    if not isinstance(schedule, StandardSchedule):
        return "the workload's own schedule does not look at it"
    sch = sch or create_schedule(skeleton(workload))
    if reason := schedule.no_kernels(sch):
        return reason
    head = head_of(sch, schedule.blocks(sch)).module
    if head.out_features < LARGE_HEAD * head.in_features:
        return f"{head.out_features:,} logits a token are too few for it to pay"
    return workload.once(formed_logits)


def formed_logits(workload: Workload) -> str | None:
    """Reason why the logits of a workload's head would be materialised anyway; None if they are not.

    Its schedule is a StandardSchedule. Its loss is computed for one sample of fake tensors, after the first blocks of
    the model.
    """
    from ..schedule import create_schedule
    from ..schedule.primitives.fused_loss import formed_for

    schedule = workload.schedule or generic_schedule
    assert isinstance(schedule, StandardSchedule)
    batch = make_batch(workload, 1, 0)
    try:
        with fake_pass(workload, workload.probe, batch) as (model, step, fakes):
            sch = create_schedule(model)
            blocks = schedule.blocks(sch)
            head = head_of(sch, blocks).fused_loss().module
            _shorten(model, [block.path for block in blocks])
            args, kwargs = step.inputs(fakes)
            step.loss(model(*args, **kwargs), fakes)
    except (WorkloadError, ScheduleError):
        raise
    except UNABLE as error:
        message = " ".join(str(error).split())[:200]
        failure = f"{type(error).__name__}: {message}"
        return f"the use of logits by its loss cannot be observed without running it ({failure})"
    uses = formed_for(head)
    if formed := sorted(name for name, is_formed in uses.items() if is_formed):
        return f"its loss takes logits by {', '.join(formed)}, for which they have to be formed"
    return None if uses else "its loss takes no logits"


def _shorten(model: "nn.Module", blocks: list[str]) -> None:
    """Shortens the lists of blocks to their first members: for the rest, only shapes matter."""
    from torch import nn

    for path in {block.rpartition(".")[0] for block in blocks}:
        members: Any = model.get_submodule(path)
        if isinstance(members, nn.ModuleList):
            del members[_LOOKED_AT:]
