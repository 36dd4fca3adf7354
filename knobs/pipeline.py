"""In which order a pipeline runs its micro-batches, and which of its ranks holds which of its stages.

Stated once, below all floors: the schedule language runs it, the default space and estimates follow from it,
and exports name it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
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


PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = {
    "1f1b": PipelineSchedule(made_by="Schedule1F1B"),
    "gpipe": PipelineSchedule(made_by="ScheduleGPipe", waits=True),
    "interleaved": PipelineSchedule(made_by="ScheduleInterleaved1F1B", least=2, most=None, in_rounds=True),
    "zero_bubble": PipelineSchedule(
        made_by="ScheduleInterleavedZeroBubble", most=None, in_rounds=True, splits_backward=True
    ),
    "zbv": PipelineSchedule(made_by="ScheduleZBVZeroBubble", least=2, most=2, v_shaped=True, splits_backward=True),
}
"""By the knob `pipeline_schedule`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank of a pipeline holds which of its stages."""

    stages: int
    ranks: int
    v_shaped: bool = False
    """Whether every second lap through the ranks runs backwards, so that rank 0 of p holds the stages 0 and
    2p - 1; otherwise each lap begins at rank 0."""

    def rank(self, stage: int) -> int:
        """The rank that holds a stage."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and lap % 2 else place

    def held(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage in range(self.stages) if self.rank(stage) == rank]
