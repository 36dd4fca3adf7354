"""What a configuration means: in which formats it computes, what its replicas exchange, when and how, which
blocks its stages have and which of them are recomputed. `redline.knobs.pipeline` has the orders of a pipeline.

Stated once. Training is built from it (`training/training.py`), time and memory are estimated from it
(`runners/estimate`), and exports say it in the words of other frameworks (`frameworks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BUCKET_MIB = 25.0
"""What replicas that are kept whole exchange at once, MiB; the default of torch's DistributedDataParallel."""
LEAST_CHUNK = 128
"""Tokens of the smallest chunk of a large micro-batch whose logits are not formed: below it products are too thin to be
fast."""


def most_chunk(hidden: int) -> int:
    """Tokens of a chunk of a large micro-batch whose logits are not formed. A chunk adds its part to the gradient of the
    head's weight, vocabulary x hidden numbers, after some passes over vocabulary x chunk: with half as many tokens as
    features the one costs about as much as the others, and the logits take half of that gradient."""
    return max(LEAST_CHUNK, hidden // 2)


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a training step: `fp32`, `tf32`, `bf16`, `fp16` or `fp8`."""

    weights: str = "fp32"
    """What the optimizer updates, and its state."""
    compute: str = "fp32"
    """Matrix products."""
    gathered: str = "fp32"
    """In what weights that are cut over replicas (ZeRO 2 and 3) are gathered."""
    gradients: str = "fp32"
    """In what gradients add up."""
    reduced: str = "fp32"
    """In what gradients travel between replicas."""
    scaling: str | None = None
    """What of 8-bit numbers shares a scale: a tensor, or each of its rows (the primitive `float8`)."""

    @property
    def autocast(self) -> str | None:
        """What products are cast to; None where they are computed in the format of the weights. Beside those
        in 8 bits, which the linear layers of repeated blocks have, all others are in bf16."""
        compute = "bf16" if self.compute == "fp8" else self.compute
        return compute if compute not in (self.weights, "tf32") else None

    @property
    def compute_bytes(self) -> int:
        """Bytes of what a product reads."""
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
"""By the knob `precision`. TensorFloat-32 (`tf32`) is a class of its own: weights, optimizer and sums as in `fp32`, and what
products multiply is rounded to 10 bits. With fp16 the loss is scaled, and gradients are unscaled in float32."""

FLOAT8 = tuple(name for name, formats in FORMATS.items() if formats.compute == "fp8")
"""Values of the knob `precision` that compute in 8 bits."""
REDUCED = ("fp32", "bf16")
"""Values of the knob `reduce_dtype`: what gradients of float32 travel in."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What replicas exchange in one optimizer step."""

    cut: tuple[str, ...]
    """What they share among them: of `optimizer`, `gradients` and `weights`."""
    reduced: str
    """When gradients are summed over them: once a `step`, or with every `micro_batch`, since keeping them whole
    until the last would take the memory that cutting them is there to save."""
    gathered: str
    """When weights are collected: `never`; behind the `update`, each from its owner; in the forward pass, for
    the whole `step`; or for every `pass`, forward and backward."""
    hsdp: int = 1
    """Into how many groups replicas are divided, each of which cuts all that is cut over its own ranks."""
    summed: str = "step"
    """When the groups sum what each has reduced: as `reduced`."""


EXCHANGES: Mapping[int, Exchange] = {
    0: Exchange((), "step", "never"),
    1: Exchange(("optimizer",), "step", "update"),
    2: Exchange(("optimizer", "gradients"), "micro_batch", "step"),
    3: Exchange(("optimizer", "gradients", "weights"), "micro_batch", "pass"),
}
"""By the knob `zero`. Source: Rajbhandari et al., ZeRO (2020)."""

SUMMED: Mapping[bool, str] = {False: "step", True: "micro_batch"}
"""When groups of replicas (HSDP) sum their gradients, by whether it is in a pipeline: what a micro-batch adds
is kept in pieces until the last, but a stage of a pipeline does not know which is its last."""


def formats_of(config: Mapping[str, Any]) -> Formats:
    """The formats of a configuration, by its knobs `precision` and `reduce_dtype`.

    Raises:
        KeyError: there is no such precision.
    """
    found = FORMATS[str(config.get("precision", "fp32"))]
    narrow = config.get("reduce_dtype", "fp32") == "bf16"
    return replace(found, reduced="bf16") if narrow else found


def exchange_of(config: Mapping[str, Any], replicas: int) -> Exchange:
    """What so many replicas exchange in a configuration, by its knobs `zero`, `hsdp` and `pp`."""
    if replicas == 1:
        return EXCHANGES[0]
    pipelined = int(config.get("pp", 1)) > 1
    return replace(EXCHANGES[int(config.get("zero", 0))], hsdp=int(config.get("hsdp", 1)), summed=SUMMED[pipelined])


def pipeline_schedule_of(config: Mapping[str, Any], micro_batches: int | None) -> str:
    """In which of `redline.knobs.pipeline.PIPELINE_SCHEDULES` a pipeline runs so many micro-batches (None: enough), by the knobs
    `pipeline_schedule`, `virtual_stages` and `pp`."""
    if named := config.get("pipeline_schedule"):
        return str(named)
    if config.get("virtual_stages", 1) > 1:
        return "interleaved"
    # 1F1B keeps fewer activations, and needs as many micro-batches as stages.
    return "gpipe" if micro_batches is not None and micro_batches < config.get("pp", 1) else "1f1b"


def stage_sizes(blocks: int, stages: int) -> list[int]:
    """How many blocks each stage of a pipeline has: in even shares, the first stages a block more where there
    is a rest, since the head comes with the last.

    >>> stage_sizes(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(blocks, stages)
    return [least + (stage < more) for stage in range(stages)]


def recomputed(blocks: int, ratio: float) -> list[int]:
    """Which of the blocks of a stage are recomputed at a `checkpoint_ratio`: `round(ratio * blocks)` of them,
    spread evenly.

    >>> recomputed(4, 0.5), recomputed(12, 0.25)
    ([1, 3], [3, 7, 11])
    """
    chosen = round(ratio * blocks)
    return [index for index in range(blocks) if (index + 1) * chosen // blocks > index * chosen // blocks]
