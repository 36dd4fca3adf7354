"""Orders of a pipeline's micro-batches, the blocks of its stages, and the placement of these on ranks.

They are defined once, in the lowest layer of the package: the schedule language runs them, the default space and
estimates use them, and exports name them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """Order in which the stages of a pipeline run the micro-batches of a batch."""

    made_by: str
    """Class of torch.distributed.pipelining."""
    least: int = 1
    """Smallest number of stages per rank."""
    most: int | None = 1
    """Largest number of stages per rank; None for any number."""
    in_rounds: bool = False
    """True if the micro-batches come in rounds of one per rank."""
    waits: bool = False
    """True if no backward pass begins before all forward passes are done."""
    v_shaped: bool = False
    """See `Placement`."""
    splits_backward: bool = False
    """True if gradients of a stage's inputs are computed first and those of its weights later, when the stage would
    wait.
    """


PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = {
    "1f1b": PipelineSchedule(made_by="Schedule1F1B"),
    "gpipe": PipelineSchedule(made_by="ScheduleGPipe", waits=True),
    "interleaved": PipelineSchedule(made_by="ScheduleInterleaved1F1B", least=2, most=None, in_rounds=True),
    "zero_bubble": PipelineSchedule(
        made_by="ScheduleInterleavedZeroBubble", most=None, in_rounds=True, splits_backward=True
    ),
    "zbv": PipelineSchedule(made_by="ScheduleZBVZeroBubble", least=2, most=2, v_shaped=True, splits_backward=True),
}
"""By value of the knob `pipeline_schedule`."""


def blocks_of_stages(text: str) -> tuple[int, ...]:
    """Returns the number of blocks of each stage, in the order of the model, of a value of the knob `stage_blocks`.

    >>> blocks_of_stages("7,8, 8,9")
    (7, 8, 8, 9)

    Raises:
        UsageError: it is not whole numbers of at least 1, separated by commas.
    """
    counts = [count.strip() for count in text.split(",")]
    for count in counts:
        if not (count.isascii() and count.isdigit() and len(count) < 9 and int(count) > 0):
            raise UsageError(
                f"stage_blocks has the number of blocks of each stage, such as 7,8,8,9, but in {text!r} is {count!r}"
            )
    return tuple(map(int, counts))


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a pipeline's stages on its ranks."""

    stages: int
    ranks: int
    v_shaped: bool = False
    """True if every second pass through the ranks is reversed, so that rank 0 of p has the stages 0 and 2p - 1;
    otherwise each pass begins at rank 0.
    """

    def rank(self, stage: int) -> int:
        """Rank of a stage."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and lap % 2 else place

    def held(self, rank: int) -> list[int]:
        """Stages of a rank, ascending."""
        return [stage for stage in range(self.stages) if self.rank(stage) == rank]
