"""Default spaces: the knobs that exist on the devices at hand and that the workload supports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ..base.device import Device, float8_obstacle, fusion_obstacle, liger_obstacle
from ..base.errors import SpaceError, UsageError, nearest, unknown
from ..base.option import option
from ..knobs.layers import of_blocks
from ..knobs.lossy import LOSSY
from ..knobs.meaning import FLOAT8, REDUCED, recomputed
from ..knobs.rules import RULES, Rule, RuleContext
from ..knobs.strategy import OF_SEVERAL, ON_REQUEST, STANDARD, checked
from ..space import Expression, Knob, Space
from ..space.expression import negation
from ..space.knob import DerivedKnob
from . import parallel
from .architecture import Architecture
from .families import generic_schedule
from .families.standard import KNOBS, Runs, StandardSchedule, Support, unconvertible
from .kernels import kernels_obstacle
from .samples import Mixing, mixing_of
from .skeleton import experts_in, skeleton
from .workload import NEUTRAL, Workload, user_code_errors

TRAINER_MICRO_BATCH = 8
"""`per_device_train_batch_size` of transformers.TrainingArguments."""
ALLOWABLE = ("lossy",)
"""Extensions of a default space that have to be allowed explicitly."""
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_MICRO_BATCHES = 12  # powers of two up to 2,048, which bounds the space
SMALL_MODEL = 100_000_000
"""Parameters of a model for which `tf32` is tried beside `bf16`."""


def make_space(
    workload: Workload,
    device: Device,
    devices: int = 1,
    *,
    grad_accum: Sequence[int] | None = None,
    allow: Sequence[str] = (),
) -> Space:
    """Returns a new space for `devices` devices like `device`: the workload's own space, or `default_space`.

    Args:
        device, devices, grad_accum, allow: of `default_space`; the last two have no meaning for the workload's own
            space.

    Raises:
        WorkloadError: the workload's own function does not return a Space.
        SpaceError: the global batch cannot be shared among the devices, or `allow` has no meaning here.
    """
    if workload.space is None:
        return default_space(workload, device, devices, grad_accum=grad_accum, allow=allow)
    checked_allowance(allow, own_space=True)
    return workload.own_space(device, devices)


def default_space(
    workload: Workload,
    device: Device,
    devices: int = 1,
    *,
    grad_accum: Sequence[int] | None = None,
    allow: Sequence[str] = (),
) -> Space:
    """The standard knobs, each only if it can have an effect.

    Defaults are those of `transformers.Trainer`: plain data parallelism, 8 samples per micro-batch, its choice of
    attention, fused AdamW, no checkpointing or compilation; with `bf16=True` on a GPU with bfloat16, in float32
    elsewhere. Every configuration does the same work per optimizer step, the workload's global batch, unless
    `grad_accum` is free; and every one is the same training, unless lossy values are allowed: `micro_batch` does not vary
    if something mixes the samples of a micro-batch (`models.mixing`).

    Args:
        device: kind of device, and number of devices of a host.
        grad_accum: values of that knob; it then varies freely, and the samples of a step with it. None derives it from
            the global batch.
        allow: `lossy` adds the values that trade accuracy for speed, if they pay on the device.

    Raises:
        SpaceError: the global batch cannot be shared among the devices, regardless of the degrees; or `allow` contains
            something else.
    """
    allow = checked_allowance(allow)
    space = Space()
    facts = workload.once_here(_schedule_facts)
    mixing = mixing_of(workload)
    total = workload.global_batch
    own_loss = workload.loss is not None
    spread = parallel.declare(
        space,
        total,
        device,
        devices,
        facts.parallel,
        any_batch=grad_accum is not None,
        seq_len=workload.seq_len,
        own_loss=own_loss,
        experts=bool(facts.experts),
    )
    _micro_batch(space, workload, spread, mixing, any_batch=grad_accum is not None, lossy="lossy" in allow)
    if "checkpoint_ratio" in facts.followed and facts.runs.blocks:
        _checkpointing(space, facts.runs.blocks)
    float8 = not (float8_obstacle(device) or facts.parallel.float8(1))
    declare_precision(space, device, facts.parameters, lossy="lossy" in allow, float8=float8)
    if isinstance(workload.model, Architecture):
        _attention(space, workload.model, device)
    if "fusion" in facts.followed and fusion_obstacle(device) is None:
        space.flag("fusion", help="compile each repeated block")
    if "kernels" in facts.followed:
        _kernels(space, device)
    if workload.takes_fused:
        space.flag("fused_optimizer", default=True, help="update all parameters in one kernel")
    _accumulation(space, total, grad_accum)
    parallel.compose(space, device, devices, facts.parallel)
    if "zero" in space.by_name and "lossy" in allow:
        space.choice(
            "reduce_dtype",
            REDUCED,
            # Gradients of bf16 weights are in bf16 anyway.
            when=(parallel.replicas(space) > 1) & (space["precision"] != "bf16_pure"),
            others=(),
            help="what gradients travel in between replicas; bf16 is lossy",
        )
    require_rules(
        space,
        RuleContext(
            devices=devices,
            global_batch=None if grad_accum is not None else total,
            seq_len=workload.seq_len,
            tokens=workload.seq_len is not None,
            own_loss=own_loss,
            no_stage_blocks=facts.no_stage_blocks,
            experts=facts.experts,
            mixing=mixing.reason,
            **facts.runs._asdict(),
        ),
    )
    return space


def require_rules(space: Space, context: RuleContext, rules: Sequence[Rule] = RULES) -> None:
    """Adds the negation of each rule that configurations of a space can break."""
    space.beyond = context
    knobs = _RuleKnobs(space)
    for rule in rules:
        obeyed = negation(rule.broken(knobs, context))
        if isinstance(obeyed, Expression) and _compatible(space, obeyed.names):
            space.require(obeyed, rule.reason(context))


def _compatible(space: Space, names: Sequence[str]) -> bool:
    """Returns True if some configuration has all of these knobs."""
    conditions = [condition for name in names if (condition := space[name].when) is not None]
    if len(conditions) < 2:  # a knob that no configuration has is not declared
        return True
    probe = space.copy()
    try:
        for condition in conditions:
            probe.require(condition)
    except SpaceError:
        return False
    return True


class _RuleKnobs:
    """The knobs of a space for rules; a missing knob has its neutral value."""

    def __init__(self, space: Space) -> None:
        self._knobs = space.by_name

    def __getattr__(self, name: str) -> Any:
        knob = self._knobs.get(name)
        if knob is None:
            return STANDARD[name].neutral
        return _RuleName(knob) if knob.kind == "text" else knob


class _RuleName:
    """A knob whose values are names. Comparisons with names that it cannot have are False."""

    def __init__(self, knob: Knob) -> None:
        self._knob = knob
        self.known = {*knob.values, *(knob.others or ())}

    def isin(self, names: Iterable[str]) -> Any:
        accepted = [name for name in names if name in self.known]
        return self._knob.isin(accepted) if accepted else False

    def __eq__(self, name: object) -> Any:
        return self._knob == name if name in self.known else False

    def __ne__(self, name: object) -> Any:
        return self._knob != name if name in self.known else True

    __hash__ = None  # type: ignore[assignment]


def _micro_batch(
    space: Space, workload: Workload, spread: parallel.Spread, mixing: Mixing, *, any_batch: bool, lossy: bool
) -> None:
    total = workload.global_batch
    sizes = sorted({size for dp in spread.replicas for size in micro_batches(max(1, total // dp))})
    share = max(1, total // spread.default_dp)
    dividing = [size for size in sizes if any_batch or share % size == 0]
    default = min(dividing, key=lambda size: abs(size - TRAINER_MICRO_BATCH))
    others = f"; others than {default} are lossy, since {mixing.reason}" if mixing.reason else ""
    space.choice(
        "micro_batch",
        [default] if mixing.reason and not lossy else sizes,
        default=default,
        help=f"{'sequences' if workload.seq_len else 'samples'} in one forward pass of one replica{others}",
        monotone_memory=1,
    )
    if mixing.over_replicas and "dp" in space.by_name:
        space.require(space["dp"] == spread.default_dp, f"{mixing.reason} of all replicas")
    for name in ("sp", "cp"):
        if mixing.reason and name in space.by_name:
            space.require(space[name] == 1, f"{mixing.reason}, of which {name} would give each rank a part")


def _accumulation(space: Space, total: int, values: Sequence[int] | None) -> None:
    """Adds `grad_accum`: with these values, or the quotient of the global batch by replicas and micro-batch."""
    help_text = "micro-batches per optimizer step"
    if values is not None:
        space.choice("grad_accum", values, help=help_text, monotone_memory=0)
        return
    samples = space["micro_batch"] * space["dp"] if "dp" in space.by_name else space["micro_batch"]
    space.derive("grad_accum", total // samples, help=help_text)


def _checkpointing(space: Space, blocks: int) -> None:
    offered = ratios(blocks)
    space.choice(
        "checkpoint_ratio",
        offered,
        default=0.0,
        others=[count / blocks for count in range(blocks + 1) if count / blocks not in offered],
        help=f"share of the {blocks} repeated blocks whose activations are recomputed",
        monotone_memory=-1,
    )


def declare_precision(space: Space, device: Device, parameters: int, *, lossy: bool, float8: bool) -> None:
    """Adds `precision`, with the number formats worth trying for a model of this size on a device."""
    tried, possible = precisions(device, parameters, lossy=lossy, float8=float8)
    help_text = "number format of the arithmetic"
    if "tf32" in tried:
        help_text += "; tf32 rounds what products of float32 multiply to 10 bits"
    if "bf16_pure" in tried:
        help_text += "; bf16_pure is lossy, without fp32 master weights"
    if "fp8" in tried:
        help_text += "; fp8 (a scale a tensor) and fp8_rowwise are lossy, products in 8 bits, for use with fusion"
    space.choice("precision", tried, default=usual_precision(device), others=possible, help=help_text)


def usual_precision(device: Device) -> str:
    """Number format of the default configuration on a device."""
    return "bf16" if device.type == "cuda" and "bf16" in precisions(device, parameters=0)[0] else "fp32"


def _attention(space: Space, model: Architecture, device: Device) -> None:
    names = model.attentions(device)
    # On a CPU `eager` is faster than `sdpa` at some sizes.
    tried = [name for name in names if name != "eager"] if device.type == "cuda" else []
    help_text = "implementation of attention in transformers"
    space.choice(
        "attention", tried or names, default=model.default_attention, others=names if tried else (), help=help_text
    )


def _kernels(space: Space, device: Device) -> None:
    help_text = "compute the loss from hidden states, never holding all logits"
    if not liger_obstacle(device.type):
        help_text += "; norms, gated feed-forward parts and rotary embeddings by Liger-Kernel"
    space.flag("kernels", help=help_text)


def fix_knob(space: Space, name: str, value: Any) -> None:
    """Fixes a knob of a space to one value; see `set_values`."""
    set_values(space, name, [value], fixed=True)


def set_values(space: Space, name: str, values: Sequence[Any], fixed: bool = False) -> None:
    """Sets the values of a knob of a space. A knob that no default space has is added to it, together with its rules.

    Raises:
        SpaceError: unknown knob, a value of another kind, or no configuration is left.
    """
    if name not in ON_REQUEST or name in space.by_name:
        context = space.beyond
        if name in OF_SEVERAL and name not in space.by_name and getattr(context, "devices", None) == 1:
            raise SpaceError(f"{name} needs two devices or more: {option('devices', 2)}")
        if fixed:
            space.fix(name, values[0])
        else:
            space.override(name, values)
        return
    try:
        checked_values = list(dict.fromkeys(checked(name, value) for value in values))
    except UsageError as error:
        raise SpaceError(str(error)) from error
    context = space.beyond if isinstance(space.beyond, RuleContext) else RuleContext()
    if name == "strategy":
        if "checkpoint_ratio" in space.by_name:
            space.fix("checkpoint_ratio", 0.0)  # a strategy itself contains the recomputed blocks
        if (blocks := context.blocks) is not None:
            for strategy in checked_values:
                of_blocks(strategy, blocks)
    staged = name == "stage_blocks" and "pp" in space.by_name
    space.choice(name, checked_values, when=space["pp"] > 1 if staged else None, help=_HELP[name])
    require_rules(space, context, [rule for rule in RULES if name in rule.knobs])


_HELP = {
    "strategy": "the strategy of each run of blocks",
    "stage_blocks": "number of blocks of each pipeline stage",
    "capacity_factor": "rows that an expert computes at most, relative to the mean; the others are dropped, which is lossy",
}


def micro_batches(samples: int) -> list[int]:
    """Divisors of a replica's samples; only the powers of two and the number itself if there are too many."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    if len(divisors) > MAX_MICRO_BATCHES:
        divisors = [size for size in divisors if size & (size - 1) == 0 or size == samples]
    return divisors


def ratios(blocks: int) -> list[float]:
    """Distinct checkpoint ratios for a number of blocks: of those that round to the same, the nearest.

    >>> ratios(2), ratios(12)
    ([0.0, 0.5, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    nearest: dict[int, float] = {}
    for ratio in RATIOS:
        count = len(recomputed(blocks, ratio))
        if count not in nearest or abs(ratio * blocks - count) < abs(nearest[count] * blocks - count):
            nearest[count] = ratio
    return sorted(nearest.values())


def checked_allowance(allow: str | Sequence[str], own_space: bool = False) -> tuple[str, ...]:
    """Names of the allowed extensions of the default space.

    Raises:
        SpaceError: the extension does not exist, or the space is the user's own.
    """
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in names:
        if name not in ALLOWABLE:
            raise SpaceError(unknown("allowance", name, ALLOWABLE))
    if names and own_space:
        raise SpaceError(
            f"allow={','.join(names)} would have no effect: it adds values to a default space, and your own "
            "space names its values itself"
        )
    return names


def precisions(
    device: Device, parameters: int, *, lossy: bool = False, float8: bool = False
) -> tuple[list[str], list[str]]:
    """Number formats worth trying for a model on a device, and those that also work there.

    On a GPU with bfloat16, products are fastest in it. Only a small model, whose time is that of launching kernels, can be
    faster in tf32, which needs no casts; fp32 is nowhere faster than tf32. A CPU without native bfloat16 emulates it:
    measured at fifteen times the time for a sixth less memory, so it is not tried unless requested. With native bfloat16,
    float16 has no advantage. `lossy` adds bf16_pure, and with `float8` (device and model support it) the formats of fp8.
    """
    if device.type == "cuda":
        native = (device.capability or (0, 0)) >= (8, 0)
        if not native:
            tried, possible = ["fp32", "fp16"], ["bf16"]
        elif parameters <= SMALL_MODEL:
            tried, possible = ["tf32", "bf16"], ["fp32", "fp16"]
        else:
            tried, possible = ["bf16"], ["fp32", "tf32", "fp16"]
    else:
        native = "bf16" in device.features
        tried, possible = (["fp32", "bf16"], []) if native else (["fp32"], ["bf16"])
    (tried if lossy and native else possible).extend(["bf16_pure", *(FLOAT8 if float8 else ())])
    return tried, possible


def without_float8(workload: Workload, device: Device) -> str | None:
    """Returns why a workload's default space lacks fp8; None if it has fp8."""
    return float8_obstacle(device) or workload.once_here(_schedule_facts).parallel.float8(1)


def runs_of(workload: Workload) -> Runs:
    """The repeated blocks of a workload's model, and how runs of them can differ."""
    return workload.once(_find_runs)


def _find_runs(workload: Workload) -> Runs:
    from ..schedule import create_schedule

    schedule = workload.schedule if isinstance(workload.schedule, StandardSchedule) else generic_schedule
    return schedule.runs(create_schedule(skeleton(workload)))


def check_knobs(workload: Workload, space: Space) -> tuple[str, ...]:
    """Returns notes about knobs of a user's own space whose names look like misspelt standard ones.

    Raises:
        SpaceError: a knob has no standard meaning, nothing of the workload takes the configuration, and no other knob
            and no constraint depends on it.
    """
    referenced = {name for rule in space.constraints for name in rule.names}
    for knob in space.knobs:
        rule = knob.rule if isinstance(knob, DerivedKnob) else knob.when
        referenced.update(() if rule is None else rule.names)
    custom = [
        knob.name
        for knob in space.knobs
        if knob.name not in STANDARD and not knob.derived and knob.name not in referenced
    ]
    own_schedule = workload.schedule is not None and not isinstance(workload.schedule, StandardSchedule)
    if own_schedule or (workload.takes_config and not isinstance(workload.model, Architecture)):
        return tuple(
            f"the knob '{name}' has no standard meaning; did you mean '{matches[0]}'?"
            for name in custom
            if (matches := get_close_matches(name, STANDARD, n=1, cutoff=0.85))
        )
    if custom:
        raise SpaceError(
            f"the knob '{custom[0]}' of the space would have no effect{nearest(custom[0], STANDARD) or ':'} It has no standard "
            f"meaning, and no function of {workload.name} takes the configuration (model(config) or schedule(sch, config))"
        )
    return ()


def lossy_of_space(space: Space) -> dict[str, list[Any]]:
    """Values of each knob of a workload's space that give another training: those that trade accuracy for speed, and other
    micro-batches than the default if something mixes their samples.
    """
    lossy_values = {}
    for name, lossy in LOSSY.items():
        knob = space.by_name.get(name)
        if values := [value for value in (knob.values if knob is not None else ()) if value in lossy]:
            lossy_values[name] = values
    knob = space.by_name.get("micro_batch")
    if knob is not None and not knob.derived and isinstance(space.beyond, RuleContext) and space.beyond.mixing:
        if other_sizes := [value for value in knob.values if value != knob.default]:
            lossy_values["micro_batch"] = other_sizes
    return lossy_values


def with_mixing(workload: Workload, space: Space) -> tuple[str, ...]:
    """Marks in any space how the workload mixes the samples of a micro-batch; returns a note if values of `micro_batch`
    are other trainings because of it.
    """
    reason = mixing_of(workload).reason
    knob = space.by_name.get("micro_batch")
    if not reason or knob is None or knob.derived:
        return ()
    context = space.beyond if isinstance(space.beyond, RuleContext) else RuleContext()
    space.beyond = replace(context, mixing=reason)
    if other_sizes := lossy_of_space(space).get("micro_batch"):
        listed = ", ".join(map(str, other_sizes))
        return (f"micro_batch={listed} trains differently from {knob.default}, and is marked as lossy: {reason}",)
    return (f"micro_batch is {knob.default} in every trial, since others are another training: {reason}",)


def nothing_allowed(space: Space, allow: Sequence[str]) -> tuple[str, ...]:
    """Note about a space to which the allowed extension added nothing."""
    if "lossy" not in allow or lossy_of_space(space):
        return ()
    hint = "".join(f"; {option('override')} {setting} tries it anyway" for setting in lossy_beyond(space))
    return (f"no lossy value pays on these devices, whose bf16 is emulated{hint}",)


def lossy_beyond(space: Space) -> list[str]:
    """Lossy values that the space would accept and does not contain, as `knob=value`."""
    knob = space.by_name.get("precision")
    if knob is None:
        return []
    lossy = (value for value in knob.others or () if value in LOSSY["precision"])
    return [f"precision={value}" for value in lossy if value not in knob.values]


class _Recorder(Mapping[str, Any]):
    """A configuration that records which knobs were read."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Abilities of a workload's schedule."""

    followed: set[str]
    """Supported knobs that rewrite the model on one device."""
    runs: Runs
    parallel: Support
    """Supported parallel knobs."""
    experts: tuple[int, ...]
    """Numbers of experts of the model's mixtures, unique."""
    parameters: int
    no_stage_blocks: str | None
    """Obstacle to stages with given numbers of blocks."""


def _schedule_facts(workload: Workload) -> _Facts:
    from ..schedule import create_schedule

    sch = create_schedule(skeleton(workload))
    experts = experts_in(sch.module)
    parameters = sum(parameter.numel() for parameter in sch.module.parameters())
    schedule = workload.schedule or generic_schedule
    if isinstance(schedule, StandardSchedule):
        followed = set(KNOBS) - ({"kernels"} if kernels_obstacle(workload, sch) else set())
        return _Facts(
            followed=followed,
            runs=schedule.runs(sch),
            parallel=schedule.support(sch),
            experts=experts,
            parameters=parameters,
            no_stage_blocks=schedule.no_stage_blocks,
        )
    blocks = generic_schedule.blocks(sch)
    recorder = _Recorder(NEUTRAL)
    with user_code_errors(f"{workload.name}: schedule(sch, config)"):
        schedule(sch, recorder)

    def ignored(name: str) -> str | None:
        return None if name in recorder.read else f"the workload's own schedule does not look at {name}"

    return _Facts(
        followed=recorder.read & set(KNOBS),
        runs=Runs(blocks=len(blocks), no_runs=ignored("strategy")),
        parallel=Support(
            tp=lambda ranks: None if ranks == 1 else ignored("tp"),
            sequences=lambda sp, cp, tp: (ignored("sp") if sp > 1 else None) or (ignored("cp") if cp > 1 else None),
            pp=lambda stages: None if stages == 1 else ignored("pp"),
            virtual_stages=ignored("virtual_stages"),
            float8=lambda ranks: unconvertible(block.module for block in blocks),
            sequence_parallel=ignored("sequence_parallel"),
        ),
        experts=experts,
        parameters=parameters,
        no_stage_blocks=ignored("stage_blocks"),
    )
