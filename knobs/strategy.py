"""The standard knobs, and a `Strategy`: the value of each of them in one configuration.

A training is built from a `Strategy`, an estimate is computed from the same fields as arrays, and exports are written
from it. `redline.knobs.meaning` defines the meaning of the values, `redline.knobs.rules` their valid combinations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import isfinite, prod
from typing import Any, NamedTuple

from ..base.errors import UsageError
from .layers import canonical
from .meaning import (
    FORMATS,
    PIPELINE_SCHEDULES,
    REDUCED,
    Formats,
    blocks_of_stages,
    formats_of,
    pipeline_schedule_of,
    stage_sizes,
)

MAX_DEVICES = 1 << 20
"""Largest number of devices of one training."""
OFFLOADS = ("none", "optimizer")
"""Values of the knob `offload`."""
DEGREES = ("tp", "sp", "cp", "pp", "dp")
"""Knobs whose product is the number of devices."""
SPLITS = ("tp", "pp", "cp", "sp")
"""Knobs for the number of devices that share one replica."""
BLOCK_KNOBS = ("strategy", "stage_blocks")
"""Knobs that name blocks, as texts with commas. No default space varies them: a refinement block by block or the user
sets them."""
OF_SEVERAL = (
    *(*DEGREES, "ep", "etp", "zero", "hsdp", "sequence_parallel"),
    *("pipeline_schedule", "virtual_stages", "reduce_dtype"),
)
"""Knobs without an effect on one device."""
ON_REQUEST = (*BLOCK_KNOBS, "capacity_factor")
"""Knobs that a default space has only if the user gives their values."""


def is_whole(value: Any) -> bool:
    """Returns True for an integer that is not a flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def _spelled(text: str) -> str:
    return ",".join(map(str, blocks_of_stages(text)))


TEXTS: Mapping[str, Callable[[str], str]] = {"strategy": canonical, "stage_blocks": _spelled}
"""For each knob of `BLOCK_KNOBS` a function that returns the canonical spelling of a value, or raises UsageError."""


def _is_text(name: str, value: Any) -> bool:
    if not isinstance(value, str):
        return value is None
    try:
        TEXTS[name](value)
    except UsageError:
        return False
    return True


class Values(NamedTuple):
    """The values that a knob can have."""

    contain: Callable[[Any], bool]
    text: str
    """Completes the sentence `KNOB must be ...`."""


def _among(*values: Any) -> Values:
    return Values(lambda value: value in values, f"one of {', '.join(map(str, values))}")


_DEGREE = Values(lambda value: is_whole(value) and 1 <= value <= MAX_DEVICES, "a whole number of at least 1")
_COUNT = Values(lambda value: is_whole(value) and 0 <= value <= MAX_DEVICES, "a whole number from 0 on")
_SIZE = Values(lambda value: is_whole(value) and value >= 1, "a whole number of at least 1")
_FLAG = Values(lambda value: isinstance(value, bool), "true or false")
_SHARE = Values(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
    "a number from 0 to 1",
)
_FACTOR = Values(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and isfinite(value),
    "a number from 0 on",
)
_STAGE = Values(lambda value: is_whole(value) and 0 <= value <= 3, "a stage from 0 to 3")
_NAME = Values(lambda value: value is None or isinstance(value, str), "a name")
_LAYERS = Values(partial(_is_text, "strategy"), "runs of blocks, such as 0-7:tp2,ckpt 8-31:zero3")
_STAGES = Values(partial(_is_text, "stage_blocks"), "the number of blocks of each stage, such as 7,8,8,9")
_FLAG_OR_NONE = Values(lambda value: value is None or isinstance(value, bool), "true or false")


def _knob(neutral: Any, values: Values, memory: int = 0) -> Any:
    """A field for a standard knob, see `StandardKnob`."""
    return field(default=neutral, metadata={"values": values, "memory": memory})


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """The standard knobs of one configuration; missing ones have their neutral value."""

    tp: int = _knob(1, _DEGREE, -1)
    sp: int = _knob(1, _DEGREE, -1)
    cp: int = _knob(1, _DEGREE, -1)
    pp: int = _knob(1, _DEGREE, -1)
    dp: int = _knob(1, _DEGREE)
    ep: int = _knob(1, _DEGREE)
    """Neighbours among the replicas that share the experts of a mixture."""
    etp: int = _knob(0, _COUNT)
    """Number of tensor-parallel ranks that each expert is cut over: 1, or tp. 0: tp."""
    capacity_factor: float = _knob(0, _FACTOR)
    """Rows that an expert computes at most in training, relative to the mean; the others are dropped. 0: all."""
    zero: int = _knob(0, _STAGE, -1)
    hsdp: int = _knob(1, _DEGREE, 1)
    sequence_parallel: bool = _knob(False, _FLAG)
    pipeline_schedule: str | None = _knob(None, Values(_NAME.contain, f"one of {', '.join(PIPELINE_SCHEDULES)}"))
    """A name in `PIPELINE_SCHEDULES`; `of` resolves it for a pipeline. None without one."""
    virtual_stages: int = _knob(1, _DEGREE)
    stage_blocks: str | None = _knob(None, _STAGES)
    """Blocks of each of the pp * virtual_stages stages (`blocks_of_stages`); None for even shares."""
    micro_batch: int = _knob(1, _SIZE, 1)
    grad_accum: int = _knob(1, _SIZE)
    checkpoint_ratio: float = _knob(0, _SHARE, -1)
    precision: str = _knob("fp32", _among(*FORMATS))
    attention: str | None = _knob(None, _NAME)
    """transformers' name; None for the model's default."""
    fusion: bool = _knob(False, _FLAG)
    fused_optimizer: bool | None = _knob(None, _FLAG_OR_NONE)
    """None for the optimizer's default."""
    kernels: bool = _knob(False, _FLAG)
    offload: str = _knob("none", _among(*OFFLOADS))
    reduce_dtype: str = _knob("fp32", _among(*REDUCED))
    strategy: str | None = _knob(None, _LAYERS)
    """Strategies of runs of blocks (`redline.knobs.layers`); None if all blocks are treated alike."""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], *, devices: int | None = None, global_batch: int | None = None
    ) -> "Strategy":
        """Returns the strategy of a configuration. A knob without effect beside the others, such as `zero` of one
        replica, has its neutral value; knobs that are not standard are ignored.

        Args:
            config: values by knob.
            devices: devices of the training; if `dp` is not a knob it is their number over the other degrees.
            global_batch: samples of one optimizer step; if `micro_batch` or `grad_accum` are not knobs they follow
                from it.

        Raises:
            UsageError: a knob has an invalid value, or the global batch cannot be divided.
        """
        values = {name: checked(name, config[name]) for name in _NAMES if name in config}
        if "dp" not in values and devices is not None:
            values["dp"] = max(1, devices // prod(values.get(name, 1) for name in DEGREES))
        if global_batch is not None:
            values.update(_batch(values, global_batch))
        strategy = cls(**values)
        order = None if strategy.pp == 1 else pipeline_schedule_of(values, values.get("grad_accum"))
        return strategy.replace(
            pipeline_schedule=order,
            virtual_stages=strategy.virtual_stages if strategy.pp > 1 else 1,
            stage_blocks=strategy.stage_blocks if strategy.pp > 1 and not is_even(strategy.stage_blocks) else None,
            zero=strategy.zero if strategy.replicas > 1 else 0,
            sequence_parallel=strategy.sequence_parallel and strategy.tp > 1,
            etp=strategy.etp if strategy.etp != strategy.tp else 0,
        )

    def replace(self, **changes: Any) -> "Strategy":
        """A copy with some values changed."""
        return replace(self, **changes)

    @property
    def devices(self) -> int:
        """Product of the degrees."""
        return self.tp * self.sp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same weights: replicas with their own samples, times ranks that share sequences."""
        return self.dp * self.sp * self.cp

    @property
    def needs_experts(self) -> bool:
        """True if experts are distributed differently from other weights, or have a capacity, in any block."""
        return self.ep > 1 or self.etp > 0 or self.capacity_factor > 0

    @property
    def formats(self) -> Formats:
        """Number formats of a step."""
        return formats_of({"precision": self.precision, "reduce_dtype": self.reduce_dtype})


def is_even(text: str | None) -> bool:
    """True if `stage_blocks` are the even shares that stages have by default."""
    if text is None:
        return True
    blocks = blocks_of_stages(text)
    return list(blocks) == stage_sizes(sum(blocks), len(blocks))


def _batch(values: Mapping[str, Any], total: int) -> dict[str, int]:
    """`micro_batch` and `grad_accum`, if a configuration lacks one or both."""
    if "micro_batch" in values and "grad_accum" in values:
        return {}
    dp = values.get("dp", 1)
    share, remainder = divmod(total, dp)
    if remainder:
        raise UsageError(f"the global batch must be a multiple of dp, {dp}, but is {total}")
    micro = values.get("micro_batch") or share // values.get("grad_accum", 1)
    accum = values.get("grad_accum") or share // micro if micro else 0
    if micro < 1 or accum < 1:
        raise UsageError(
            f"micro_batch and grad_accum must be at least 1, but are {micro} and {accum} with {share} samples a replica"
        )
    if micro * accum != share:
        given_name, value = ("grad_accum", accum) if "grad_accum" in values else ("micro_batch", micro)
        raise UsageError(f"{given_name} must divide a replica's samples, {share}, but is {value}")
    return {"micro_batch": micro, "grad_accum": accum}


class StandardKnob(NamedTuple):
    """A knob with the same meaning for every model."""

    neutral: Any
    """Value that requires nothing of a framework."""
    can_be: Callable[[Any], bool]
    """Returns True for a valid value. The space of a callable may use the knob's name for something else."""
    memory: int = 0
    """1 if a larger value needs more memory in every trainer, -1 if less, 0 if neither is certain."""


def checked(name: str, value: Any) -> Any:
    """Returns a value of a standard knob, a text in its canonical spelling.

    Raises:
        UsageError: the knob cannot have it.
    """
    if name in TEXTS and isinstance(value, str):
        return TEXTS[name](value)  # its error names the place in the text
    values = _NAMES[name]
    if not values.contain(value):
        raise UsageError(f"{name} must be {values.text}, but is {value!r}")
    return value


_NAMES: Mapping[str, Values] = {knob.name: knob.metadata["values"] for knob in fields(Strategy)}
STANDARD: Mapping[str, StandardKnob] = {
    knob.name: StandardKnob(knob.default, knob.metadata["values"].contain, knob.metadata["memory"])
    for knob in fields(Strategy)
}
"""By their names."""
