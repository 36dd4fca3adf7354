"""Rules for valid combinations of knobs in a configuration.

A `Rule` defines the combinations that it refuses only by comparisons, `&`, `|` and arithmetic, so that one predicate
works on

- a `Strategy`: the runtime refuses by it (`refusal`), and exports and checks report it;
- a space, whose knobs are expressions: the default space requires the negation (`models/spaces.py`), and
  `redline space` explains by it;
- columns of configurations as numpy arrays: the estimator refuses by it.

Rules that depend on the model, such as heads that `tp` must divide, are found by applying its schedule to a copy
without weights (`models/families/standard.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from .layers import Run, parse
from .meaning import PIPELINE_SCHEDULES, blocks_of_stages
from .strategy import DEGREES, STANDARD, Strategy
from .text import config_text


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleContext:
    """Inputs of rules besides knobs. None if unknown or free: rules on it then refuse nothing."""

    devices: int | None = None
    """Devices of a training."""
    global_batch: int | None = None
    """Samples of one optimizer step over all devices."""
    seq_len: int | None = None
    """Tokens of a sample."""
    tokens: bool = True
    """True if samples consist of tokens."""
    own_loss: bool = False
    """True if the workload has its own loss, instead of the model's."""
    blocks: int | None = None
    """Repeated blocks of the model."""
    no_runs: str | None = None
    """Reason why the blocks of the model cannot have different degrees of tensor parallelism; None if they can."""
    no_stage_blocks: str | None = None
    """Reason why the knob `stage_blocks` cannot set the blocks of the model's stages; None if it can."""
    experts: tuple[int, ...] | None = None
    """Numbers of experts of the model's mixtures, unique; empty for a model without any."""
    mixing: str | None = None
    """The part of the training that mixes the samples of a micro-batch; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Values of knobs that cannot be combined."""

    name: str
    knobs: tuple[str, ...]
    """Knobs that it reads."""
    broken: Callable[[Any, RuleContext], Any]
    """`broken(knobs, context)`, with an attribute for each knob: a bool, an expression or a boolean array."""
    reason: Callable[[RuleContext], str]
    """The requirement, or the reason against the combination."""
    general: bool = False
    """True if it applies to every trainer, not only redline's own."""
    of_stages: bool = False
    """True if it is about the stages of the standard schedules; a user's schedule may make others, which the schedule
    language checks (`schedule/parallel/pipeline.py`).
    """


def one_of(value: Any, names: Iterable[Any]) -> Any:
    """Condition that a knob has one of these values; False for no values."""
    if hasattr(value, "isin"):  # an expression, whose `isin` is one node rather than a chain of `|`
        return value.isin(names)
    condition: Any = False
    for name in names:
        condition = condition | (value == name)
    return condition


def refusal(
    strategy: Strategy,
    context: RuleContext,
    rules: "Iterable[Rule] | None" = None,
) -> str | None:
    """Returns the first rule that a strategy breaks, as `KNOB=VALUE, ...: REASON`; None if it breaks none."""
    for rule in RULES if rules is None else rules:
        if rule.broken(strategy, context):
            return f"{_values(rule, strategy)}: {rule.reason(context)}"
    return None


def _values(rule: Rule, strategy: Strategy) -> str:
    """Values of a rule's knobs that are not neutral, as `tp=2, fusion=true`."""
    values = {name: getattr(strategy, name) for name in rule.knobs}
    changed = {name: value for name, value in values.items() if value != STANDARD[name].neutral} or values
    return config_text(changed, between=", ")


# -- experts ----------------------------------------------------------------------------------------------------


def _replicas(k: Any) -> Any:
    """Number of ranks with the same weights."""
    return k.dp * k.sp * k.cp


def _uneven_sharers(k: Any, context: RuleContext) -> Any:
    """ep divides neither the replicas nor, with whole experts, the replicas and tensor-parallel ranks together."""
    replicas = _replicas(k)
    uneven = ((replicas * k.tp) % k.ep != 0) | ((k.ep % k.tp != 0) & (k.tp % k.ep != 0))
    return (k.ep > 1) & (((k.etp != 1) & (replicas % k.ep != 0)) | ((k.etp == 1) & uneven))


def _experts(context: RuleContext) -> str:
    """Requirement on degrees that divide the experts."""
    numbers = context.experts or ()
    experts = f"the {' and '.join(map(str, numbers))} experts of a layer" if numbers else "the experts of each layer"
    return f"ep must divide {experts}{_divisors(gcd(*numbers))}"


def _divisors(number: int) -> str:
    """Divisors of a number to end a sentence with: `: 1, 2 or 4`; empty for 0 and 1."""
    *less, largest = [""] + [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f": {', '.join(less[1:])} or {largest}" if len(less) > 1 else ""


# -- pipelines --------------------------------------------------------------------------------------------------

_EARLY = [name for name, schedule in PIPELINE_SCHEDULES.items() if not schedule.waits and not schedule.in_rounds]
_ROUNDS = [name for name, schedule in PIPELINE_SCHEDULES.items() if schedule.in_rounds]
SPLITTING = tuple(name for name, schedule in PIPELINE_SCHEDULES.items() if schedule.splits_backward)
"""Pipeline schedules that compute the gradients of weights separately from those of inputs."""
CHUNKED = tuple(name for name, schedule in PIPELINE_SCHEDULES.items() if schedule.most != 1)
"""Pipeline schedules with possibly several stages per rank."""
_SPLIT = " and ".join(SPLITTING)
NOT_SPLIT = {
    "checkpoint": f"{_SPLIT} would recompute a block again for the gradients of its weights",
    "compile": f"{_SPLIT} cannot divide the backward pass of a compiled block",
    "fuse": f"{_SPLIT} cannot divide the backward pass of a compiled subgraph",
    "fused_loss": f"{_SPLIT} cannot divide the backward pass of a loss whose gradients are formed once",
    "shard_data": f"{_SPLIT} compute the gradients of weights apart from the backward pass, in which ZeRO 2 and 3 "
    "reduce them; use ZeRO 0 or 1",
}
"""Reason, by primitive, against a backward pass in two parts."""


def _stages_of(name: str) -> Rule:
    schedule = PIPELINE_SCHEDULES[name]
    fixed = schedule.least == schedule.most
    chunks = str(schedule.most) if fixed else f"{schedule.least} or more"

    def broken(k: Any, context: RuleContext) -> Any:
        wrong = k.virtual_stages != schedule.most if fixed else k.virtual_stages < schedule.least
        return (k.pipeline_schedule == name) & wrong

    return Rule(
        name=f"stages of {name}",
        knobs=("pipeline_schedule", "virtual_stages"),
        broken=broken,
        reason=lambda context: f"{name} runs {chunks} model chunk{'' if chunks == '1' else 's'} on each rank",
        of_stages=True,
    )


def _splitting(k: Any) -> Any:
    return one_of(k.pipeline_schedule, SPLITTING)


# -- a strategy per layer ---------------------------------------------------------------------------------------


def _where(k: Any, condition: Callable[[tuple[Run, ...]], Any]) -> Any:
    """Condition that the runs of the knob `strategy` meet another condition, which may read other knobs."""
    return _meets(k.strategy, lambda text: condition(parse(text)))


def _meets(knob: Any, condition: Callable[[str], Any]) -> Any:
    """Condition that the value of a text knob meets another condition, which may read other knobs."""
    met_by_any: Any = False
    for value in _texts(knob):
        met = condition(value)
        if met is not False:
            met_by_any = met_by_any | (one_of(knob, [value]) & met)
    return met_by_any


def _texts(strategy: Any) -> list[str]:
    """Possible values of a text knob: one in a configuration, several in a space or in columns."""
    if strategy is None:
        return []
    if isinstance(strategy, str):
        return [strategy]
    texts = getattr(strategy, "known", strategy)
    return sorted({value for value in texts if isinstance(value, str)})


def _cut_unlike(k: Any) -> Any:
    """Some run is cut over fewer ranks than the mesh has."""
    return _where(k, lambda runs: _any(run.tp < k.tp for run in runs if run.tp is not None))


def _zero_unlike(k: Any) -> Any:
    """Some run has another stage of ZeRO than the modules outside of blocks."""
    return _where(k, lambda runs: _any(run.zero != k.zero for run in runs if run.zero is not None))


def _zero_of_some(k: Any) -> Any:
    """Some weights are cut over replicas by FSDP."""
    return (k.zero >= 2) | _where(k, lambda runs: any((run.zero or 0) >= 2 for run in runs))


def _any(conditions: Iterable[Any]) -> Any:
    combined: Any = False
    for condition in conditions:
        combined = combined | condition
    return combined


# -- formats and kernels ----------------------------------------------------------------------------------------

_OTHER_ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def _rule(
    name: str,
    knobs: str,
    broken: Callable[[Any, RuleContext], Any],
    reason: "str | Callable[[RuleContext], str]",
    general: bool = False,
    of_stages: bool = False,
) -> Rule:
    requirement = reason if callable(reason) else lambda context: reason
    return Rule(
        name=name, knobs=tuple(knobs.split()), broken=broken, reason=requirement, general=general, of_stages=of_stages
    )


RULES: Sequence[Rule] = (
    _rule(
        "devices",
        " ".join(DEGREES),
        lambda k, context: context.devices is not None and k.tp * k.sp * k.cp * k.pp * k.dp != context.devices,
        lambda context: f"{' * '.join(DEGREES)} must equal the number of devices ({context.devices})",
        general=True,
    ),
    _rule(
        "global batch",
        "micro_batch dp grad_accum",
        lambda k, context: (
            context.global_batch is not None and k.micro_batch * k.dp * k.grad_accum != context.global_batch
        ),
        lambda context: (
            f"micro_batch * {'' if context.devices == 1 else 'dp * '}grad_accum must equal "
            f"the global batch ({context.global_batch})"
        ),
        general=True,
    ),
    _rule(
        "hsdp needs sharding",
        "hsdp zero",
        lambda k, context: (k.hsdp > 1) & (k.zero < 2),
        "hsdp needs zero 2 or 3: nothing else is cut within a group of replicas",
        general=True,
    ),
    _rule(
        "hsdp groups",
        "hsdp dp sp cp",
        lambda k, context: (k.hsdp > 1) & ((_replicas(k) % k.hsdp != 0) | (_replicas(k) <= k.hsdp)),
        "hsdp must divide the dp * sp * cp replicas into groups of two or more",
        general=True,
    ),
    _rule(
        "sequences of tokens",
        "sp cp",
        lambda k, context: not context.tokens and k.sp * k.cp > 1,
        "samples have no tokens, so there is no sequence to cut",
        general=True,
    ),
    _rule(
        "own loss of sequences",
        "sp cp",
        lambda k, context: context.own_loss and k.sp * k.cp > 1,
        "the workload's own loss takes whole samples, and ranks that share a sequence have a piece each",
    ),
    _rule(
        "tokens of a ring",
        "cp",
        lambda k, context: context.seq_len is not None and (k.cp > 1) & (context.seq_len % (2 * k.cp) != 0),
        lambda context: f"2 * cp must divide the {context.seq_len} tokens of a sample",
        general=True,
    ),
    _rule(
        "tokens of a shard",
        "sp cp",
        lambda k, context: context.seq_len is not None and (k.sp * k.cp > 1) & (context.seq_len % (k.sp * k.cp) != 0),
        lambda context: f"sp * cp must divide the {context.seq_len} tokens of a sample",
        general=True,
    ),
    _rule(
        "tokens of sequence_parallel",
        "sequence_parallel tp sp cp",
        lambda k, context: (
            context.seq_len is not None and k.sequence_parallel & (context.seq_len % (k.tp * k.sp * k.cp) != 0)
        ),
        lambda context: f"tp * sp * cp must divide the {context.seq_len} tokens of a sample to cut them",
        general=True,
    ),
    _rule(
        "experts of a dense model",
        "ep",
        lambda k, context: context.experts == () and k.ep > 1,
        "the model has no experts, so ep must be 1",
        general=True,
    ),
    _rule(
        "capacity of a dense model",
        "capacity_factor",
        lambda k, context: context.experts == () and k.capacity_factor > 0,
        "the model has no experts, so capacity_factor must be 0",
    ),
    _rule(
        "tensor parallelism of a dense model",
        "etp",
        lambda k, context: context.experts == () and k.etp > 0,
        "the model has no experts, so etp must be 0",
    ),
    _rule(
        "ranks of an expert",
        "etp tp",
        lambda k, context: (k.etp > 1) & (k.etp != k.tp),
        "etp must be 1 or tp: an expert is on one of the ranks that share a layer, or cut over all of them",
    ),
    _rule(
        "tokens of whole experts",
        "etp tp sp cp micro_batch",
        lambda k, context: (
            context.seq_len is not None
            and (k.etp == 1) & ((k.micro_batch * context.seq_len) % (k.tp * k.sp * k.cp) != 0)
        ),
        lambda context: (
            "with etp=1 the tp ranks divide the tokens of a micro-batch: tp * sp * cp must divide "
            f"micro_batch * {context.seq_len}"
        ),
    ),
    _rule(
        "experts of a rank",
        "ep",
        lambda k, context: bool(context.experts) and gcd(*(context.experts or ())) % k.ep != 0,
        _experts,
        general=True,
    ),
    _rule(
        "replicas that share experts",
        "ep dp sp cp etp tp",
        _uneven_sharers,
        "ep must divide the dp * sp * cp replicas, because this number of neighbours shares the experts; with etp=1 the "
        "tp ranks share them too, so ep must divide tp, or be a multiple of it that divides tp * dp * sp * cp",
    ),
    _rule(
        "experts and hsdp",
        "ep hsdp etp",
        lambda k, context: ((k.ep > 1) | (k.etp == 1)) & (k.hsdp > 1),
        "experts that are shared have replicas of their own, which hsdp does not divide; use hsdp=1",
    ),
    _rule(
        "depth of a strategy",
        "strategy",
        lambda k, context: context.blocks is not None and _where(k, lambda runs: runs[-1].last + 1 != context.blocks),
        lambda context: (
            f"the runs of a strategy cover the model's {context.blocks} blocks, 0 to {context.blocks - 1}"
            if context.blocks
            else "the model has no repeated blocks that a strategy could name"
        ),
    ),
    _rule(
        "runs of a model",
        "strategy tp",
        lambda k, context: bool(context.no_runs) and _cut_unlike(k),
        lambda context: f"runs cannot differ in tp in this model: {context.no_runs}",
    ),
    _rule(
        "tp of a run",
        "strategy tp",
        lambda k, context: _where(
            k, lambda runs: _any(k.tp % run.tp != 0 for run in runs if run.tp is not None and run.tp > 1)
        ),
        "tp of each run of the strategy must divide tp, the ranks that share the modules outside of blocks",
    ),
    _rule(
        "samples of a run",
        "strategy tp micro_batch",
        lambda k, context: _where(
            k, lambda runs: _any((k.micro_batch * run.tp) % k.tp != 0 for run in runs if run.tp is not None)
        ),
        "ranks that do not share a run's layers share its samples, so tp over that of the run must divide micro_batch",
    ),
    _rule(
        "whole experts of a run",
        "strategy tp etp",
        lambda k, context: (k.etp == 1) & _cut_unlike(k),
        "with etp=1 all blocks have the same tp",
    ),
    _rule(
        "sequences of a run",
        "strategy tp sequence_parallel",
        lambda k, context: k.sequence_parallel & _cut_unlike(k),
        "runs of unlike tp hand over whole sequences, so sequence_parallel must be false",
    ),
    _rule(
        "recomputed blocks",
        "strategy checkpoint_ratio",
        lambda k, context: (k.checkpoint_ratio > 0) & _where(k, lambda runs: True),
        "the items ckpt of a strategy select the recomputed blocks: checkpoint_ratio must be 0",
    ),
    _rule(
        "groups of a run",
        "strategy tp zero hsdp",
        lambda k, context: (k.hsdp > 1) & (_zero_unlike(k) | _cut_unlike(k)),
        "hsdp divides the replicas of all blocks alike: use hsdp=1 where runs differ in tp or zero",
    ),
    _rule(
        "runs of a pipeline",
        "strategy zero pp",
        lambda k, context: (k.pp > 1) & _zero_unlike(k) & _zero_of_some(k),
        "in a pipeline ZeRO 2 and 3 cut all blocks alike",
    ),
    _rule(
        "runs and a split backward",
        "strategy tp pipeline_schedule",
        lambda k, context: _splitting(k) & (_cut_unlike(k) | _where(k, lambda runs: any(run.ckpt for run in runs))),
        f"{_SPLIT} need blocks that are cut alike and keep their activations",
    ),
    _rule(
        "runs and scaled gradients",
        "strategy tp zero precision",
        lambda k, context: (k.precision == "fp16") & (_zero_unlike(k) | _cut_unlike(k)),
        "fp16 unscales the gradients of all blocks together; use bf16",
    ),
    _rule(
        "runs and an offloaded optimizer",
        "strategy tp zero offload",
        lambda k, context: (k.offload != "none") & (_zero_unlike(k) | _cut_unlike(k)) & _zero_of_some(k),
        "an offloaded optimizer moves weights that are all cut alike over replicas",
    ),
    _rule(
        "micro-batches of a pipeline",
        "pp pipeline_schedule grad_accum",
        lambda k, context: one_of(k.pipeline_schedule, _EARLY) & (k.grad_accum < k.pp),
        f"{' and '.join(_EARLY)} need a micro-batch for every rank of the pipeline",
    ),
    _rule(
        "rounds of a pipeline",
        "pp pipeline_schedule grad_accum",
        lambda k, context: one_of(k.pipeline_schedule, _ROUNDS) & (k.grad_accum % k.pp != 0),
        f"{' and '.join(_ROUNDS)} run the micro-batches in rounds of one for every rank of the pipeline",
    ),
    _rule(
        "stages of a model",
        "stage_blocks pp",
        lambda k, context: bool(context.no_stage_blocks) and _meets(k.stage_blocks, lambda text: k.pp > 1),
        lambda context: f"its stages cannot have other numbers of blocks: {context.no_stage_blocks}",
    ),
    _rule(
        "blocks of the stages",
        "stage_blocks",
        lambda k, context: (
            context.blocks is not None
            and _meets(k.stage_blocks, lambda text: sum(blocks_of_stages(text)) != context.blocks)
        ),
        lambda context: f"the numbers in stage_blocks must add up to the model's {context.blocks} blocks",
    ),
    _rule(
        "numbers of the stages",
        "stage_blocks pp virtual_stages",
        lambda k, context: _meets(k.stage_blocks, lambda text: k.pp * k.virtual_stages != len(blocks_of_stages(text))),
        "stage_blocks has a number for each of the pp * virtual_stages stages",
    ),
    *(_stages_of(name) for name, order in PIPELINE_SCHEDULES.items() if order.least > 1 or order.most is not None),
    _rule(
        "split backward and ZeRO",
        "pipeline_schedule zero",
        lambda k, context: _splitting(k) & (k.zero >= 2),
        NOT_SPLIT["shard_data"],
    ),
    _rule(
        "split backward and recomputation",
        "pipeline_schedule checkpoint_ratio",
        lambda k, context: _splitting(k) & (k.checkpoint_ratio > 0),
        NOT_SPLIT["checkpoint"],
        of_stages=True,
    ),
    _rule(
        "split backward and compilation",
        "pipeline_schedule fusion",
        lambda k, context: _splitting(k) & k.fusion,
        NOT_SPLIT["compile"],
        of_stages=True,
    ),
    _rule(
        "split backward and fused loss",
        "pipeline_schedule kernels",
        lambda k, context: _splitting(k) & k.kernels,
        NOT_SPLIT["fused_loss"],
        of_stages=True,
    ),
    _rule(
        "sharded head",
        "kernels zero pp",
        lambda k, context: k.kernels & ((k.zero >= 2) & (k.pp > 1) | (context.own_loss & (k.zero >= 3))),
        "ZeRO cuts the head again after its forward pass, before the loss of `kernels` needs it",
    ),
    _rule(
        "fp16 in a pipeline",
        "precision pp",
        lambda k, context: (k.precision == "fp16") & (k.pp > 1),
        "a pipeline does not scale the loss, as fp16 needs it; use bf16",
    ),
    _rule(
        "fp16 offloaded",
        "precision offload",
        lambda k, context: (k.precision == "fp16") & (k.offload != "none"),
        "fp16 unscales gradients on the device; use bf16",
    ),
    _rule(
        "fp16 and fused loss",
        "precision kernels",
        lambda k, context: (k.precision == "fp16") & k.kernels,
        "`kernels` forms the head's gradient before the loss is scaled, as fp16 needs it; use bf16",
    ),
    _rule(
        "format of flash attention",
        "attention precision",
        lambda k, context: (k.attention == "flash_attention_2") & one_of(k.precision, ("fp32", "tf32")),
        "flash attention has no float32",
    ),
    _rule(
        "attention of a ring",
        "cp attention",
        lambda k, context: (k.cp > 1) & one_of(k.attention, _OTHER_ATTENTION),
        "a ring has its own attention, which uses torch's flash attention if attention is sdpa",
    ),
)
"""All rules; the first broken one gives the reason."""
GENERAL: Sequence[Rule] = tuple(rule for rule in RULES if rule.general)
"""Rules that apply to every trainer."""


def sequence_refusal(seq_len: int | None, sp: int, cp: int, *, own_loss: bool = False) -> str | None:
    """Returns the reason why `sp * cp` ranks cannot share sequences; None if they can.

    Args:
        seq_len: tokens of a sample; None if samples have no tokens.
        sp, cp: numbers of ranks that exchange heads, and of a ring.
        own_loss: True if the loss is not the model's own.

    >>> sequence_refusal(12, 2, 4)
    '2 * cp must divide the 12 tokens of a sample (cp=4)'
    """
    context = RuleContext(seq_len=seq_len, tokens=seq_len is not None, own_loss=own_loss)
    strategy = Strategy(sp=sp, cp=cp)
    broken = (rule for rule in RULES if set(rule.knobs) <= {"sp", "cp"} and rule.broken(strategy, context))
    return next((f"{rule.reason(context)} ({_values(rule, strategy)})" for rule in broken), None)
