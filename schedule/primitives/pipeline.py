"""pipeline: how the micro-batches of a batch run through the stages."""

from ...base.errors import ScheduleError, unknown
from ...knobs.pipeline import PIPELINE_SCHEDULES
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def pipeline(sch: ScheduledModule, schedule: str = "1f1b", micro_batches: int | None = None) -> None:
    """Says how a batch runs through the stages that `cut_pipeline_stage` makes.

    Args:
        schedule: `gpipe`: all forwards, then all backwards; `1f1b`: a backward as soon as possible, so that
            fewer activations live; `interleaved`: 1F1B with several stages a rank; `zero_bubble`: gradients
            of weights are computed apart, where a rank would wait (ZB1P), with one stage a rank or more;
            `zbv`: likewise with two stages a rank in the shape of a V, so that the first rank holds the
            first and the last stage. Default without this call: `1f1b` with one stage a rank, `interleaved`
            with more.
        micro_batches: into how many parts a batch is divided; default: the number of stages.

    Raises:
        ScheduleError: not the root; unknown schedule; a number below 1; called before.

    What a schedule cannot run, `build` refuses: see `schedule/parallel/schedule_check.py`.

    Source: https://pytorch.org/docs/stable/distributed.pipelining.html; Narayanan et al., arXiv:2104.04473;
    Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """
    label = f"pipeline on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: there is one pipeline, so call it on the root's schedule")
    if schedule not in PIPELINE_SCHEDULES:
        raise ScheduleError(f"{label}: {unknown('schedule', schedule, PIPELINE_SCHEDULES)}")
    if micro_batches is not None and (isinstance(micro_batches, bool) or micro_batches < 1):
        raise ScheduleError(f"{label}: micro_batches must be at least 1, but got {micro_batches!r}")
    if sch.tree.pipeline is not None:
        raise ScheduleError(f"{label}: it is set once, and it already is")
    sch.tree.pipeline = (schedule, micro_batches)
