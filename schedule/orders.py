"""In which order a pipeline runs its micro-batches: the schedules there are, and what each asks for."""

from dataclasses import dataclass

from ..errors import ScheduleError
from .schedule import Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """In which order the stages of a pipeline run the micro-batches of a batch."""

    made_by: str
    """The class of torch.distributed.pipelining."""
    least: int = 1
    """Stages that a rank holds at least."""
    most: int | None = 1
    """And at most; None for any number."""
    in_rounds: bool = False
    """Whether the micro-batches come in rounds of as many as there are ranks."""
    waits: bool = False
    """Whether no backward pass begins before all forward passes are done."""
    v_shaped: bool = False
    """See `Placement`."""
    splits_backward: bool = False
    """Whether gradients of a stage's inputs are computed first and those of its weights later, where the
    stage would wait."""


SCHEDULES = {
    "1f1b": Order(made_by="Schedule1F1B"),
    "gpipe": Order(made_by="ScheduleGPipe", waits=True),
    "interleaved": Order(made_by="ScheduleInterleaved1F1B", least=2, most=None, in_rounds=True),
    "zero_bubble": Order(
        made_by="ScheduleInterleavedZeroBubble", most=None, in_rounds=True, splits_backward=True
    ),
    "zbv": Order(made_by="ScheduleZBVZeroBubble", least=2, most=2, v_shaped=True, splits_backward=True),
}
"""Orders by our names."""

_WHOLE = "a compiled backward computes both in one go"
NOT_SPLIT = {
    "compile": _WHOLE,
    "fuse": _WHOLE,
    "checkpoint": "it would be recomputed for each of them",
}
"""Why what a primitive makes of a model does not go with a backward pass in two parts."""


def check(tree: Tree, kind: str, stages: int, micro_batches: int, ranks: int) -> None:
    """Refuses what a schedule cannot run.

    Args:
        tree: the scheduled model.
        kind: a name in `SCHEDULES`.
        stages: of the model.
        micro_batches: of a batch.
        ranks: of the pipeline.

    Raises:
        ScheduleError: stages or micro-batches do not fit; a primitive on the model does not go with it.
    """
    order, held = SCHEDULES[kind], stages // ranks
    if stages % ranks:
        raise ScheduleError(
            f"the {ranks} ranks of the pp axis must divide the number of stages, but there are {stages} "
            f"({stages - 1} cuts)"
        )
    if held < order.least or (order.most is not None and held > order.most):
        many = {1: "one stage a rank", None: f"{order.least} stages a rank or more"}
        fit = [name for name, each in SCHEDULES.items() if each.least <= held <= (each.most or held)]
        raise ScheduleError(
            f"schedule {kind} takes {many.get(order.most, f'{order.most} stages a rank')}, but there are "
            f"{stages} on {ranks} ranks; use '{fit[0]}'"
        )
    if not order.waits and micro_batches < ranks:
        raise ScheduleError(
            f"schedule {kind} needs as many micro-batches as ranks, {ranks}, or more, but got "
            f"{micro_batches}"
        )
    if order.in_rounds and micro_batches % ranks:
        raise ScheduleError(
            f"schedule {kind}: {ranks} ranks must divide the micro-batches, but got {micro_batches}"
        )
    if order.splits_backward:
        _check_split(tree, kind)


def _check_split(tree: Tree, kind: str) -> None:
    """Refuses what computes the gradients of inputs and weights in one go."""
    found = [(step, NOT_SPLIT[step.primitive]) for step in tree.steps if step.primitive in NOT_SPLIT]
    if any("gradients" in each.arguments.get("cut", ()) for each in tree.deferred):
        reason = "ZeRO 2 and 3 reduce gradients where both are computed in one go; use ZeRO 0 or 1"
        found += [(step, reason) for step in tree.steps if step.primitive == "shard_data"]
    for step, reason in found:
        raise ScheduleError(
            f"schedule {kind} computes the gradients of weights apart from those of inputs, but "
            f"'{step.path or type(tree.module).__name__}' has {step}: {reason}"
        )
