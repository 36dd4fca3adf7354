"""What may vary by default: the knobs that exist on the devices at hand and that the workload follows."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SpaceError
from ..space import Space
from .blame import blamed
from .device import Device, fusion_obstacle
from .families import generic_schedule
from .families.standard import KNOBS, StandardSchedule
from .huggingface import Architecture
from .skeleton import skeleton
from .workload import NEUTRAL, Workload

TRAINER_MICRO_BATCH = 8
"""`per_device_train_batch_size` of transformers.TrainingArguments."""
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_MICRO_BATCHES = 12


def default_space(workload: Workload, device: Device, devices: int = 1) -> Space:
    """The standard knobs, each only where it can matter.

    Defaults are what `transformers.Trainer` would run: 8 samples a micro-batch, float32, its choice of
    attention, fused AdamW, nothing checkpointed or compiled. Every configuration does the same work per
    optimizer step, the workload's global batch.

    Raises:
        SpaceError: the global batch cannot be shared evenly among the devices.
    """
    total = workload.global_batch
    if total % devices:
        raise SpaceError(
            f"the global batch must be a multiple of the devices, but {total} is not one of {devices}; "
            f"{max(1, round(total / devices)) * devices} is"
        )
    space = Space()
    sizes = micro_batches(total // devices)
    micro = space.choice(
        "micro_batch",
        sizes,
        default=min(sizes, key=lambda size: abs(size - TRAINER_MICRO_BATCH)),
        help=f"{'sequences' if workload.seq_len else 'samples'} in one forward pass of one replica",
        monotone_memory=1,
    )
    followed, blocks = _schedule_facts(workload)
    if "checkpoint_ratio" in followed and blocks:
        offered = ratios(blocks)
        space.choice(
            "checkpoint_ratio",
            offered,
            default=0.0,
            others=[count / blocks for count in range(blocks + 1) if count / blocks not in offered],
            help=f"share of the {blocks} repeated blocks whose activations are recomputed",
            monotone_memory=-1,
        )
    tried, possible = precisions(device)
    space.choice(
        "precision",
        tried,
        default="fp32",
        others=possible,
        help="number format of the arithmetic; bf16_pure keeps the weights in it too",
    )
    if isinstance(workload.model, Architecture):
        names = workload.model.attentions(device)
        attention = space.choice(
            "attention",
            names,
            default=workload.model.default_attention,
            others=(),
            help="implementation of attention in transformers",
        )
        if "flash_attention_2" in names:
            space.require(
                (attention != "flash_attention_2") | (space["precision"] != "fp32"),
                "flash attention has no float32",
            )
    if "fusion" in followed and fusion_obstacle(device) is None:
        space.flag("fusion", help="compile each repeated block")
    if workload.takes_fused:
        space.flag("fused_optimizer", default=True, help="update all parameters in one kernel")
    together = micro
    if devices > 1:
        # One value until devices can be shared otherwise than by replicas.
        dp = space.choice("dp", [devices], others=(), help="data-parallel replicas")
        together = micro * dp
    accumulate = space.derive("grad_accum", total // together, help="micro-batches per optimizer step")
    space.require(together * accumulate == total, f"global batch {total}")
    return space


def micro_batches(samples: int) -> list[int]:
    """The divisors of a replica's samples; only the powers of two and the whole where those are too many."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    if len(divisors) > MAX_MICRO_BATCHES:
        divisors = [size for size in divisors if size & (size - 1) == 0 or size == samples]
    return divisors


def ratios(blocks: int) -> list[float]:
    """The checkpoint ratios that differ for a number of blocks: of those that round alike, the nearest.

    >>> ratios(2), ratios(12)
    ([0.0, 0.5, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    nearest: dict[int, float] = {}
    for ratio in RATIOS:
        count = round(ratio * blocks)
        if count not in nearest or abs(ratio * blocks - count) < abs(nearest[count] * blocks - count):
            nearest[count] = ratio
    return sorted(nearest.values())


def precisions(device: Device) -> tuple[list[str], list[str]]:
    """Number formats worth trying on a device, and those that work there besides.

    A CPU without native bfloat16 emulates it: measured at fifteen times the time for a sixth less memory, so
    it is not tried unless asked for. Where bfloat16 is native, float16 has nothing on it.
    """
    if device.type != "cuda":
        half = ["bf16", "bf16_pure"]
        return (["fp32", *half], []) if "bf16" in device.features else (["fp32"], half)
    if (device.capability or (0, 0)) >= (8, 0):
        return ["fp32", "bf16", "bf16_pure"], ["fp16"]
    return ["fp32", "fp16"], ["bf16", "bf16_pure"]


class _Recorder(Mapping[str, Any]):
    """A configuration that remembers which knobs were looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _schedule_facts(workload: Workload) -> tuple[set[str], int]:
    """Which knobs the workload's schedule follows, and how many repeated blocks the model has."""
    from ..schedule import create_schedule

    sch = create_schedule(skeleton(workload))
    schedule = workload.schedule or generic_schedule
    if isinstance(schedule, StandardSchedule):
        return set(KNOBS), len(schedule.blocks(sch))
    count = len(generic_schedule.blocks(sch))
    recorder = _Recorder(NEUTRAL)
    with blamed(f"{workload.name}: schedule(sch, config)"):
        schedule(sch, recorder)
    return recorder.read & set(KNOBS), count
