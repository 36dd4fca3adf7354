"""Meaning of a configuration: its number formats, the communication of its replicas, the orders of a pipeline, the
blocks of its stages and those that are recomputed.

It is defined once. Training is built from it (`training/training.py`), time and memory are estimated from it
(`estimator/`), and exports translate it to other frameworks (`frameworks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..base.errors import UsageError

if TYPE_CHECKING:
    import torch

BUCKET_MIB = 25.0
"""Size of the gradient buckets of whole replicas, MiB; the default of torch's DistributedDataParallel."""
LEAST_CHUNK = 128
"""Tokens of the smallest chunk of a large micro-batch with unmaterialised logits: smaller products are too thin to be
fast.
"""


def most_chunk(hidden: int) -> int:
    """Tokens of a chunk of a large micro-batch with unmaterialised logits. A chunk adds its part to the gradient of
    the head's weight, vocabulary x hidden numbers, after some passes over vocabulary x chunk: with half as many
    tokens as features the former costs about as much as the latter, and the logits take half the memory of that
    gradient.
    """
    return max(LEAST_CHUNK, hidden // 2)


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a training step: `fp32`, `tf32`, `bf16`, `fp16` or `fp8`."""

    weights: str = "fp32"
    """Format of the weights that the optimizer updates, and of its state."""
    compute: str = "fp32"
    """Format of matrix products."""
    gathered: str = "fp32"
    """Format in which sharded weights (ZeRO 2 and 3) are gathered."""
    gradients: str = "fp32"
    """Format in which gradients are accumulated."""
    reduced: str = "fp32"
    """Format in which gradients are reduced between replicas."""
    scaling: str | None = None
    """Granularity of the scales of 8-bit numbers: a tensor, or each of its rows (the primitive `float8`)."""

    @property
    def autocast(self) -> str | None:
        """Format that operands of products are cast to; None if products use the format of the weights. Apart from
        8-bit products, which are those of linear layers in repeated blocks, all others are in bf16.
        """
        compute = "bf16" if self.compute == "fp8" else self.compute
        return compute if compute not in (self.weights, "tf32") else None

    @property
    def compute_bytes(self) -> int:
        """Bytes per operand of a product."""
        return 2 if self.autocast or self.weights == "bf16" else 4


FORMATS: Mapping[str, Formats] = {
    "fp32": Formats(),
    "tf32": Formats(compute="tf32"),
    "bf16": Formats(compute="bf16", gathered="bf16"),
    "fp16": Formats(compute="fp16"),
    "bf16_pure": Formats("bf16", "bf16", "bf16", "bf16", "bf16"),
    "fp8": Formats(compute="fp8", gathered="bf16", scaling="tensorwise"),
    "fp8_rowwise": Formats(compute="fp8", gathered="bf16", scaling="rowwise"),
}
"""By value of the knob `precision`. TensorFloat-32 (`tf32`) is separate: weights, optimizer and sums as in `fp32`,
with operands of products rounded to 10 bits. With fp16 the loss is scaled, and gradients are unscaled in float32.
"""

FLOAT8 = tuple(name for name, formats in FORMATS.items() if formats.compute == "fp8")
"""Values of the knob `precision` that compute in 8 bits."""
REDUCED = ("fp32", "bf16")
"""Format of the reduction of float32 gradients, by value of the knob `reduce_dtype`."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Communication of replicas in one optimizer step."""

    cut: tuple[str, ...]
    """State that is sharded over them: of `optimizer`, `gradients` and `weights`."""
    reduced: str
    """When gradients are summed over them: once per `step`, or with every `micro_batch`, since keeping whole
    gradients until the last one would take the memory that sharding saves.
    """
    gathered: str
    """When weights are gathered: `never`; after the `update`, each from its owner; in the forward pass, for the whole
    `step`; or for every `pass`, forward and backward.
    """
    hsdp: int = 1
    """Number of groups of replicas, each of which shards over its own ranks."""
    summed: str = "step"
    """When the groups sum their reduced gradients: as `reduced`."""


EXCHANGES: Mapping[int, Exchange] = {
    0: Exchange((), "step", "never"),
    1: Exchange(("optimizer",), "step", "update"),
    2: Exchange(("optimizer", "gradients"), "micro_batch", "step"),
    3: Exchange(("optimizer", "gradients", "weights"), "micro_batch", "pass"),
}
"""By value of the knob `zero`. Source: Rajbhandari et al., ZeRO (2020)."""

SUMMED: Mapping[bool, str] = {False: "step", True: "micro_batch"}
"""When groups of replicas (HSDP) sum their gradients, by whether there is a pipeline: shards of gradients are kept
until the last micro-batch, but a stage of a pipeline does not know which is its last.
"""


def formats_of(config: Mapping[str, Any]) -> Formats:
    """Formats of a configuration, by its knobs `precision` and `reduce_dtype`.

    Raises:
        KeyError: there is no such precision.
    """
    formats = FORMATS[str(config.get("precision", "fp32"))]
    narrow = config.get("reduce_dtype", "fp32") == "bf16"
    return replace(formats, reduced="bf16") if narrow else formats


def exchange_of(config: Mapping[str, Any], replicas: int) -> Exchange:
    """Communication of a number of replicas in a configuration, by its knobs `zero`, `hsdp` and `pp`."""
    if replicas == 1:
        return EXCHANGES[0]
    pipelined = int(config.get("pp", 1)) > 1
    return replace(EXCHANGES[int(config.get("zero", 0))], hsdp=int(config.get("hsdp", 1)), summed=SUMMED[pipelined])


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


def pipeline_schedule_of(config: Mapping[str, Any], micro_batches: int | None) -> str:
    """Name in `PIPELINE_SCHEDULES` for a number of micro-batches (None: enough), by the knobs
    `pipeline_schedule`, `virtual_stages` and `pp`.
    """
    if schedule := config.get("pipeline_schedule"):
        return str(schedule)
    if config.get("virtual_stages", 1) > 1:
        return "interleaved"
    # 1F1B keeps fewer activations, and needs as many micro-batches as stages.
    return "gpipe" if micro_batches is not None and micro_batches < config.get("pp", 1) else "1f1b"


def stage_sizes(blocks: int, stages: int) -> list[int]:
    """Number of blocks of each pipeline stage: even shares, with the remainder in the first stages, since the last
    stage also has the head.

    >>> stage_sizes(10, 4)
    [3, 3, 2, 2]
    """
    least, remainder = divmod(blocks, stages)
    return [least + (stage < remainder) for stage in range(stages)]


def recomputed(blocks: int, ratio: float) -> list[int]:
    """Indices of the blocks of a stage that are recomputed at a `checkpoint_ratio`: `round(ratio * blocks)` of them,
    spread evenly.

    >>> recomputed(4, 0.5), recomputed(12, 0.25)
    ([1, 3], [3, 7, 11])
    """
    chosen = round(float(ratio) * blocks)  # quicker than with a number of numpy
    return [index for index in range(blocks) if (index + 1) * chosen // blocks > index * chosen // blocks]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShards:
    """Ranks that have a piece each of the same sequences.

    With a ring a sequence is cut into 2 P stretches, and rank r of the ring has r and 2 P - 1 - r: with causal
    attention, all ranks then have the same work. Each of the S ranks at that position has a part of these two.
    """

    sp: int = 1
    """Number of neighbouring ranks that exchange heads."""
    cp: int = 1
    """Number of ranks of a ring."""
    rank: int = 0
    """Index among all of them."""

    def __str__(self) -> str:
        return " with ".join(f"{name}={size}" for name, size in (("sp", self.sp), ("cp", self.cp)) if size > 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.sp * self.cp

    def piece(self, value: "torch.Tensor", dim: int) -> "torch.Tensor":
        """This rank's piece along a dimension of tokens."""
        import torch

        if self.cp > 1:
            position, stretches = self.rank // self.sp, value.chunk(2 * self.cp, dim)
            value = torch.cat((stretches[position], stretches[-1 - position]), dim)
        return value.chunk(self.sp, dim)[self.rank % self.sp].contiguous()

    def whole(self, pieces: "torch.Tensor", dim: int) -> "torch.Tensor":
        """The sequence, given the pieces of all ranks in the order of ranks: the inverse of `piece`."""
        import torch

        if self.cp == 1:
            return pieces
        stretches = pieces.chunk(2 * self.cp, dim)
        return torch.cat((*stretches[::2], *reversed(stretches[1::2])), dim)
