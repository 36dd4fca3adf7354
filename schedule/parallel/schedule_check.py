"""What the order of a pipeline's micro-batches asks of a scheduled model."""

from ...base.errors import ScheduleError
from ...knobs.pipeline import PIPELINE_SCHEDULES
from ...knobs.rules import NOT_SPLIT
from ..tree import Tree


def check_order(tree: Tree, kind: str, stages: int, micro_batches: int, ranks: int) -> None:
    """Refuses what a schedule cannot run.

    Args:
        tree: the scheduled model.
        kind: a name in `PIPELINE_SCHEDULES`.
        stages: of the model.
        micro_batches: of a batch.
        ranks: of the pipeline.

    Raises:
        ScheduleError: stages or micro-batches do not fit; a primitive on the model does not go with it.
    """
    order, held = PIPELINE_SCHEDULES[kind], stages // ranks
    if stages % ranks:
        raise ScheduleError(
            f"the {ranks} ranks of the pp axis must divide the number of stages, but there are {stages} "
            f"({stages - 1} cuts)"
        )
    if held < order.least or (order.most is not None and held > order.most):
        many = {1: "one stage a rank", None: f"{order.least} stages a rank or more"}
        fit = [name for name, each in PIPELINE_SCHEDULES.items() if each.least <= held <= (each.most or held)]
        raise ScheduleError(
            f"schedule {kind} takes {many.get(order.most, f'{order.most} stages a rank')}, but there are "
            f"{stages} on {ranks} ranks; use '{fit[0]}'"
        )
    if not order.waits and micro_batches < ranks:
        raise ScheduleError(
            f"schedule {kind} needs as many micro-batches as ranks, {ranks}, or more, but got {micro_batches}"
        )
    if order.in_rounds and micro_batches % ranks:
        raise ScheduleError(f"schedule {kind}: {ranks} ranks must divide the micro-batches, but got {micro_batches}")
    if order.splits_backward:
        _check_split(tree, kind)


def _check_split(tree: Tree, kind: str) -> None:
    """Refuses what computes the gradients of inputs and weights in one go."""
    sharded = any("gradients" in each.arguments.get("cut", ()) for each in tree.deferred)
    for step in tree.steps:
        if step.primitive in NOT_SPLIT and (step.primitive != "shard_data" or sharded):
            raise ScheduleError(
                f"schedule {kind} does not go with {step} on '{step.path or type(tree.module).__name__}': "
                f"{NOT_SPLIT[step.primitive]}"
            )
