"""Plans with a strategy for each block, found by a dynamic program over the estimator's terms.

Miao et al., Galvatron, arXiv:2211.13878, section 3.3: under a memory limit the choices of the layers of a stage are a knapsack
problem, solved by dynamic programming over layers and memory. A block can be divided over fewer ranks than the mesh has (these
then share samples), have any stage of ZeRO, and keep or recompute its activations. The program's objective is linear in blocks;
its result is predicted as a whole, and only plans that are predicted faster than the uniform winner are returned.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import SpaceError, UsageError
from ..knobs.layers import BlockStrategy, own_knobs, text_of
from ..knobs.rules import RULES, SPLITTING, RuleContext, refusal
from ..knobs.strategy import BLOCK_KNOBS, Strategy
from ..knobs.text import config_text, value_text
from ..models import Workload
from ..models.families.standard import StandardSchedule
from ..models.parallel import divisors
from ..space import Config, Space, Value
from .calibration import MEMORY_GROUPS, TIME_GROUPS
from .estimate import Estimate
from .estimator import Estimator
from .facts.model_facts import ModelFacts
from .knob_arrays import KnobArrays, knob_arrays
from .memory import stage_peak
from .stages import Stage, stages
from .survey import Ranked
from .time import stage_times

BUCKETS = 2000
"""Steps into which a stage's memory is divided."""
MARGIN = 0.98
"""Share of the memory limit that may be filled: prediction errors differ from rank to rank."""
STEPS_OF_A_BLOCK = 40
"""Minimum number of steps for each block of a stage."""
SHARES = (1.0, 0.96, 0.9, 0.82)
"""Shares of the usable memory for which plans are made."""
MORE_BLOCKS = 4
"""Blocks by which a stage may have more than its even share."""
NEAR = 4
"""Maximum ratio of the micro-batches of two related plans, in both directions."""
PREDICTED = 24
"""Plans that are predicted together, those that are nearest to the least seconds by the program first."""
MOST_BASES = 8
"""Maximum number of uniform configurations, the most promising ones, from which plans are made."""

LASTING = (
    "parameters",
    "gradients",
    "optimizer",
    "master",
    "weight copies",
    "gradient copies",
    "activations",
    "checkpoints",
)
"""Terms of memory that are additive over blocks."""
NOT_OF_BLOCKS = ("bubble", "fixed", "stalls")
"""Terms of time that are not additive over blocks."""


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """A plan with a strategy for each block, and the uniform winner."""

    uniform: Ranked
    """The uniform winner."""
    config: Mapping[str, Any]
    """The knobs of the plan."""
    estimate: Estimate
    """Its prediction."""
    layers: tuple[BlockStrategy, ...] = ()
    """Strategy of each block; empty if nothing is faster than the uniform winner."""

    @property
    def gain(self) -> float:
        """Predicted throughput over that of the uniform winner, less 1."""
        return self.estimate.throughput / self.uniform.estimate.throughput - 1

    @property
    def clear(self) -> bool:
        """True if the gain exceeds the 80 % interval of the uniform winner's throughput."""
        uniform = self.uniform.estimate
        return 1 + self.gain > uniform.step_ms / uniform.step_ms_low

    def amounts_to(self) -> dict[str, Any] | None:
        """The equivalent uniform configuration; None if blocks have different strategies, or other ones than the parameters
        outside blocks."""
        if len(set(self.layers)) != 1 or self.layers[0].tp != self.config.get("tp", 1):
            return None
        knobs = {name: value for name, value in self.config.items() if name != "strategy"}
        knobs["checkpoint_ratio"] = 1.0 if self.layers[0].ckpt else 0.0
        return {**knobs, **({"zero": self.layers[0].zero} if "zero" in knobs else {})}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "config": dict(self.config),
            "step_ms": self.estimate.step_ms,
            "throughput": self.estimate.throughput,
            "peak_memory_mib": self.estimate.peak_memory_mib,
            "probability_fits": self.estimate.probability_fits,
            "strategy": self.config.get("strategy"),
            "gain": self.gain,
        }

    def lines(self) -> list[str]:
        """As text."""
        estimate, uniform = self.estimate, self.uniform.estimate
        if self.gain <= 0 or (self.amounts_to() is not None and "stage_blocks" not in self.config):
            return ["layer by layer: nothing is gained over a uniform plan"]
        block_settings = [(name, value_text(self.config[name])) for name in BLOCK_KNOBS if name in self.config]
        knobs = config_text({name: value for name, value in self.config.items() if name not in BLOCK_KNOBS})
        return [
            f"layer by layer: {estimate.throughput:,.0f} {uniform.unit}, {100 * self.gain:+.1f} % over the "
            f"uniform winner, at {estimate.peak_memory_mib / 1024:.1f} GiB instead of "
            f"{uniform.peak_memory_mib / 1024:.1f} GiB; {100 * estimate.probability_fits:.0f} % chance to fit",
            f"  {knobs}",
            *(f'  {name}="{value}"' for name, value in block_settings),
        ]


def refine(
    estimator: Estimator,
    winner: Ranked,
    facts: ModelFacts,
    further_bases: Iterable[Config] = (),
    margin: float = MARGIN,
    context: RuleContext | None = None,
) -> Layerwise:
    """The fastest plan that is predicted to fit, derived from a uniform winner and related configurations; the winner itself if
    none is predicted to be faster.

    Args:
        estimator: predicts.
        winner: the uniform winner.
        facts: of its variant.
        further_bases: further uniform configurations to start from, such as larger micro-batches that only fit with
            everything recomputed.
        margin: share of the memory limit that may be filled.
        context: values that rules read besides knobs; None for those of the estimator.
    """
    context = replace(
        context or RuleContext(), seq_len=estimator.training.seq_len, blocks=facts.blocks, experts=facts.experts
    )
    nothing = Layerwise(uniform=winner, config=dict(winner.config), estimate=winner.estimate)
    bases = list(dict.fromkeys((winner.config, *further_bases)))
    limit = margin * estimator.memory_limit_mib
    if not np.isfinite(limit) or not facts.blocks:
        return nothing
    planned: dict[tuple[int, _Plan], dict[int, float]] = {}
    for number in _promising(estimator, bases):
        options = _options(bases[number], bases, facts.blocks, context)
        for plan, seconds in _plans(estimator, bases[number], options, facts, limit).items():
            planned[number, plan] = seconds
    least = [
        min((by_share[share] for by_share in planned.values() if share in by_share), default=0.0)
        for share in range(len(SHARES))
    ]
    order = sorted(planned, key=lambda key: min(seconds / least[share] for share, seconds in planned[key].items()))
    numbered_configs = ((number, plan, _named(bases[number], plan)) for number, plan in order)
    allowed = (entry for entry in numbered_configs if _refused(entry[2], context) is None)
    while batch := list(islice(allowed, PREDICTED)):
        table = estimator.table([config for _, _, config in batch])
        if (fits := table.fullest_memory_mib <= limit).any():
            break
    else:
        return nothing
    fastest = int(np.argmax(np.where(fits, table.throughput, -np.inf)))
    if table.throughput[fastest] <= winner.estimate.throughput:
        return nothing
    _, plan, config = batch[fastest]
    return Layerwise(uniform=winner, config=config, estimate=table.row(fastest), layers=plan.layers)


def relatives(space: Space, config: Config) -> list[Config]:
    """Configurations that differ in settings that interact with block strategies: the micro-batch, the ZeRO stage of parameters
    outside blocks, and the ranks that share these; also the pipeline schedule if the current one does not allow different
    blocks. Only blocks have experts, so `ep` is varied alone, as is `offload`."""
    free = {knob.name for knob in space.free}
    fixed = {name: config[name] for name in free if name in config}
    orders: list[dict[str, Value]] = [{}]
    if config.get("pipeline_schedule") in SPLITTING and "pipeline_schedule" in free:
        orders.append({"pipeline_schedule": "1f1b", "virtual_stages": 1} if "virtual_stages" in free else {})
    micro = _number(config, "micro_batch")
    sizes: dict[str, list[Any]] = {
        "micro_batch": [
            size for size in _values(space, "micro_batch") if micro <= NEAR * size and size <= NEAR * micro
        ],
        "zero": _values(space, "zero"),
        "tp": _values(space, "tp"),
        # Blocks that are divided differently hand over whole samples.
        "sequence_parallel": list(dict.fromkeys((config.get("sequence_parallel", False), False))),
    }
    varied = [name for name in sizes if name in free]
    changes = [
        {**order, **dict(zip(varied, values))}
        for order in orders
        for values in product(*(sizes[name] for name in varied))
    ]
    changes += [{name: value} for name in ("ep", "offload") for value in _values(space, name) if name in free]
    related: dict[Config, None] = {}
    for change in changes:
        changed = {**fixed, **change}
        if changed.get("tp", 1) == 1:
            changed.pop("sequence_parallel", None)
        for left_out in ((), ("zero", "ep")):  # exist only with replicas
            with suppress(SpaceError):
                related[space.config({name: value for name, value in changed.items() if name not in left_out})] = None
                break
    return list(related)


def _number(config: Mapping[str, Any], name: str, neutral: int = 1) -> int:
    return int(config.get(name, neutral))


def _values(space: Space, name: str) -> list[Any]:
    return list(space[name].values) if name in space.by_name and not space[name].derived else []


def followed(workload: Workload) -> bool:
    """True if a workload's schedule applies a strategy for each block; a user's own schedule may not."""
    return workload.schedule is None or isinstance(workload.schedule, StandardSchedule)


class _Plan(NamedTuple):
    """A strategy for each block, and the number of blocks of each stage; None for even shares."""

    layers: tuple[BlockStrategy, ...]
    sizes: tuple[int, ...] | None


@dataclass(frozen=True)
class _Choice:
    """One option of a block, with its seconds and MiB."""

    seconds: float
    mib: float
    layer: BlockStrategy


def _promising(estimator: Estimator, bases: Sequence[Config]) -> list[int]:
    """The uniform configurations that could be fastest with ample memory: without recomputation, ordered by time."""
    table = estimator.table([_without_recomputation(base) for base in bases])
    order = np.argsort(-table.throughput, kind="stable")
    promising = [int(number) for number in order if np.isfinite(table.step_ms[number])][:MOST_BASES]
    return promising if 0 in promising else [0, *promising[:-1]]


def _without_recomputation(base: Config) -> dict[str, Value]:
    return {name: 0.0 if name == "checkpoint_ratio" else value for name, value in base.items()}


def _plans(
    estimator: Estimator, base: Config, options: Sequence[BlockStrategy], facts: ModelFacts, limit: float
) -> dict[_Plan, dict[int, float]]:
    """Plans derived from a uniform configuration: for several shares of the memory limit, with all options and with only those
    that do not move samples; each with even shares of the blocks, and with shares that take about as long on every stage. Each
    has the seconds of a step by the program, with the bubble of a pipeline, for the numbers of the shares of the memory that lead
    to it."""
    if base.get("pipeline_schedule") in SPLITTING:  # recomputes nothing, and computes gradients of weights separately
        return {}
    tp = _number(base, "tp")
    setup = estimator.training
    uniform = {name: value for name, value in _without_recomputation(base).items() if name != "strategy"}
    cols = knob_arrays([uniform], setup)
    split, _ = next(cols.splits())

    def cut_by(sizes: tuple[int, ...] | None) -> list[Stage]:
        return stages(
            facts, split.pp, setup.balance, chunks=split.chunks, v_shaped=split.v_shaped, sizes=sizes, distinct=False
        )

    cut, columns = cut_by(split.sizes), cols.of_layers(options)
    by_count = {stage.count: stage for stage in cut}
    seconds = {count: _seconds(estimator, _blocks_of(stage), facts, columns) for count, stage in by_count.items()}
    priced = [_priced(estimator, stage, facts, cols, columns, options, seconds[stage.count]) for stage in cut]
    seconds_of_plans: dict[_Plan, dict[int, float]] = {}
    same_tp = [option for option in options if option.tp == tp]
    uneven = split.pp > 1 and split.chunks == 1 and split.sizes is None
    ends = _ends(estimator, cut, facts, cols)
    filling = 1 + (split.pp - 1) / (split.chunks * float(cols.grad_accum[0]))
    for allowed in dict.fromkeys(map(tuple, (options, same_tp))):
        ways = [
            ([choice for choice in choices if choice.layer in allowed], [share * limit - outside for share in SHARES])
            for outside, choices in priced
        ]
        divisions: dict[tuple[int, ...] | None, None] = {split.sizes: None}
        if uneven:
            divisions |= dict.fromkeys(_balanced(cut, ways, ends, share, facts.blocks) for share in range(len(SHARES)))
        for sizes in divisions:
            divided = cut if sizes == split.sizes else cut_by(sizes)
            solved = [
                knapsack([choices] * stage.count, budgets)
                for stage, (choices, budgets) in zip(divided, ways, strict=True)
            ]
            for share, solutions in enumerate(zip(*solved)):
                ways_of_stages = [way for way in solutions if way is not None]
                if len(ways_of_stages) == len(solutions):
                    plan = _Plan(
                        _in_order(divided, [[choice.layer for choice in way[2]] for way in ways_of_stages]), sizes
                    )
                    slowest = max(way[0] + end for way, end in zip(ways_of_stages, ends, strict=True))
                    seconds_of_plans.setdefault(plan, {})[share] = slowest * filling
    return seconds_of_plans if cut else {}


def _ends(estimator: Estimator, cut: Sequence[Stage], facts: ModelFacts, cols: KnobArrays) -> list[float]:
    """Seconds of the parts of each stage outside its blocks, in one configuration."""
    once: dict[tuple[bool, bool], float] = {}
    for stage in cut:
        if (stage.first, stage.last) not in once and stage.ends:
            whole, blocks = (float(_seconds(estimator, part, facts, cols)[0]) for part in (stage, _blocks_of(stage)))
            once[stage.first, stage.last] = max(whole - blocks, 0.0)
    return [once.get((stage.first, stage.last), 0.0) for stage in cut]


def _balanced(
    cut: Sequence[Stage],
    ways: Sequence[tuple[list[_Choice], list[float]]],
    ends: Sequence[float],
    share: int,
    blocks: int,
) -> tuple[int, ...] | None:
    """Number of blocks of each stage with which the slowest takes the least time, at one of the memory budgets; None if even
    shares are as good, or no shares fit.

    A stage's time grows with its blocks, so all times up to a bound allow it a number of blocks; the bound is the smallest at
    which these numbers suffice.
    """
    most = max(stage.count for stage in cut) + MORE_BLOCKS
    times = [_by_count(choices, budgets[share], most) + end for (choices, budgets), end in zip(ways, ends, strict=True)]
    bounds = np.unique(np.concatenate([times_of_stage[1:] for times_of_stage in times]))
    bounds = bounds[np.isfinite(bounds)]

    def allowed(bound: float) -> list[int]:
        return [int(np.searchsorted(times_of_stage, bound, side="right")) - 1 for times_of_stage in times]

    low, high = 0, len(bounds) - 1
    if high < 0 or min(allowed(bounds[high])) < 1 or sum(allowed(bounds[high])) < blocks:
        return None
    while low < high:
        middle = (low + high) // 2
        counts = allowed(bounds[middle])
        low, high = (low, middle) if min(counts) >= 1 and sum(counts) >= blocks else (middle + 1, high)
    sizes = allowed(bounds[low])
    while sum(sizes) > blocks:  # the slowest of those with several
        slowest = max(
            (stage for stage in range(len(sizes)) if sizes[stage] > 1), key=lambda stage: times[stage][sizes[stage]]
        )
        sizes[slowest] -= 1
    return None if sizes == [stage.count for stage in cut] else tuple(sizes)


def _by_count(choices: Sequence[_Choice], budget: float, most: int) -> np.ndarray:
    """Seconds of the fastest choices of 0 to `most` blocks whose memory is within a budget; infinite if there are none."""
    if budget < 0:
        return np.full(most + 1, np.inf)
    front = _front(choices)
    steps = _steps(front, max(budget, 1e-9) / BUCKETS)
    best, seconds = np.zeros(BUCKETS + 1), [0.0]
    for _ in range(most):
        best = np.min(_with_block(best, front, steps), axis=0)
        seconds.append(float(best[-1]))
    return np.array(seconds)


def _steps(front: Sequence[_Choice], unit: float) -> list[int]:
    """Memory of each option in steps of `unit` MiB, rounded up."""
    return [max(int(np.ceil(choice.mib / unit - 1e-9)), 0) for choice in front]


def _with_block(best: np.ndarray, front: Sequence[_Choice], steps: Sequence[int]) -> np.ndarray:
    """Seconds with a further block by each option, shape (options, budgets), from the least seconds without it at each budget."""
    seconds = np.full((len(front), len(best)), np.inf)
    for number, (option, step) in enumerate(zip(front, steps)):
        if step < len(best):
            seconds[number, step:] = best[: len(best) - step] + option.seconds
    return seconds


def _in_order(cut: Sequence[Stage], layers: Sequence[Sequence[BlockStrategy]]) -> tuple[BlockStrategy, ...]:
    """The strategy of each of a model's blocks, from those of the blocks of each stage: equal degrees are adjacent, and blocks
    that keep the most come last, since these activations are needed and freed first."""
    placed: dict[int, BlockStrategy] = {}
    for stage, stage_layers in zip(cut, layers, strict=True):
        ordered = sorted(
            stage_layers,
            key=lambda layer: (layer.tp, not layer.ckpt, -layer.zero),
        )
        placed |= dict(zip(stage.indices, ordered, strict=True))
    return tuple(placed[index] for index in sorted(placed))


def _options(base: Config, bases: Sequence[Config], blocks: int, context: RuleContext) -> list[BlockStrategy]:
    """Options of a block of a uniform configuration that break no rule: the degrees and ZeRO stages of its relatives. Groups of
    replicas (HSDP) hold all blocks alike."""
    base_strategy = BlockStrategy(ckpt=False, **own_knobs(base))
    pp, replicas = _number(base, "pp"), _number(base, "dp") * _number(base, "sp") * _number(base, "cp")
    degrees, stages_of_zero = {base_strategy.tp}, {base_strategy.zero}
    if _number(base, "hsdp") == 1:
        degrees |= set(divisors(base_strategy.tp))
        stages_of_zero |= {_number(relative, "zero", 0) for relative in bases}
        # Blocks of ZeRO 3 may stay whole from forward to backward, as in ZeRO 2.
        stages_of_zero |= {2} if base_strategy.zero == 3 else set[int]()
    options = []
    for degree in sorted(degrees):
        option = replace(base_strategy, tp=degree)
        if option != base_strategy and _refused(_named(base, _Plan((option,) * blocks, None)), context) is not None:
            continue
        joint = replicas * base_strategy.tp // degree
        for stage in sorted(stages_of_zero if pp == 1 else {base_strategy.zero}):
            if joint == 1 and stage != base_strategy.zero:
                continue
            again = (False, True) if "checkpoint_ratio" in base else (False,)
            options += [replace(option, zero=stage, ckpt=ckpt) for ckpt in again]
    return options


def _named(base: Config, plan: _Plan) -> dict[str, Any]:
    """A uniform configuration with a strategy for each block, and the blocks of each stage."""
    knobs = {name: value for name, value in base.items() if name != "checkpoint_ratio"}
    sizes = {} if plan.sizes is None else {"stage_blocks": ",".join(map(str, plan.sizes))}
    return {**knobs, **sizes, "strategy": text_of(plan.layers, **own_knobs(base))}


def _refused(config: Mapping[str, Any], context: RuleContext) -> str | None:
    """Returns the rule that a plan breaks; None if it breaks none."""
    try:
        return refusal(Strategy.of(config), context, [rule for rule in RULES if set(BLOCK_KNOBS) & set(rule.knobs)])
    except UsageError as error:
        return str(error)


def _seconds(estimator: Estimator, stage: Stage, facts: ModelFacts, columns: KnobArrays) -> np.ndarray:
    """Seconds of a stage in a step without waiting for others, for each column."""
    (terms,) = stage_times([stage], facts, columns, estimator.training, estimator.hardware, estimator.constants)
    timed = {name: value for name, value in terms.items() if name not in NOT_OF_BLOCKS}
    return sum(_corrected(timed, TIME_GROUPS, estimator, "time.").values(), np.zeros(len(columns)))


def _priced(
    estimator: Estimator,
    stage: Stage,
    facts: ModelFacts,
    base: KnobArrays,
    columns: KnobArrays,
    options: Sequence[BlockStrategy],
    seconds: np.ndarray,
) -> tuple[float, list[_Choice]]:
    """MiB of a stage without its blocks, and the cost of each option for one block, given the seconds of all."""
    setup, constants = estimator.training, estimator.constants

    def memory(of: Stage, cols: KnobArrays) -> dict[str, np.ndarray]:
        terms = stage_peak(of, facts, cols, setup, constants)
        return _corrected(terms, MEMORY_GROUPS, estimator, "memory.")

    terms = memory(_blocks_of(stage), columns)
    lasting = sum((terms[name] for name in LASTING), np.zeros(len(columns)))
    # ZeRO 2 keeps gathered weights; others gather or rebuild one or two blocks at a time.
    lasting = (lasting + np.where(columns.zero == 2, terms["buffers"], 0.0)) * (1 + constants.slack)
    # The rest: parameters outside blocks, and temporaries.
    uniform = float(sum(memory(stage, base).values(), np.zeros(1))[0])
    like = options.index(BlockStrategy(ckpt=False, **base.followed(0)))
    count = max(stage.count, 1)
    choices = [
        _Choice(float(second) / count, float(mib) / count, option)
        for second, mib, option in zip(seconds, lasting, options, strict=True)
    ]
    return uniform - float(lasting[like]), choices


def _blocks_of(stage: Stage) -> Stage:
    """A stage's blocks, without its other parts."""
    return replace(stage, ends=(), first=False, last=False)


def knapsack(
    choices: Sequence[Sequence[_Choice]], budgets: Sequence[float]
) -> "list[tuple[float, float, list[_Choice]] | None]":
    """For each budget, the fastest choices whose memory is within it: seconds, MiB, and one choice a block; None if there are
    none.

    Memory is rounded up to steps of the largest budget, `BUCKETS` or more, so the result never exceeds a budget.
    """
    most = max(budgets, default=-1.0)
    if most < 0:
        return [None] * len(budgets)
    buckets = max(BUCKETS, STEPS_OF_A_BLOCK * len(choices))
    unit = max(most, 1e-9) / buckets
    best = np.zeros(buckets + 1)
    taken = np.zeros((len(choices), buckets + 1), np.int16)
    fronts = [_front(options) for options in choices]
    steps = [_steps(front, unit) for front in fronts]
    for index, front in enumerate(fronts):
        by_option = _with_block(best, front, steps[index])
        taken[index] = np.argmin(by_option, axis=0)
        best = np.min(by_option, axis=0)
    solutions: list[tuple[float, float, list[_Choice]] | None] = []
    for budget in budgets:
        bucket = min(int(budget / unit + 1e-9), buckets) if budget >= 0 else -1
        if bucket < 0 or not np.isfinite(best[bucket]):
            solutions.append(None)
            continue
        chosen = []
        for index in range(len(fronts) - 1, -1, -1):
            number = int(taken[index, bucket])
            chosen.append(fronts[index][number])
            bucket -= steps[index][number]
        chosen.reverse()
        solutions.append((sum(choice.seconds for choice in chosen), sum(choice.mib for choice in chosen), chosen))
    return solutions


def _front(options: Sequence[_Choice]) -> list[_Choice]:
    """The Pareto-optimal options in time and memory, in the order of memory."""
    front: list[_Choice] = []
    for option in sorted(options, key=lambda option: (option.mib, option.seconds)):
        if not front or option.seconds < front[-1].seconds:
            front.append(option)
    return front


def _corrected(
    terms: Mapping[str, np.ndarray], groups: Mapping[str, tuple[str, ...]], estimator: Estimator, prefix: str
) -> dict[str, np.ndarray]:
    """Terms corrected by calibration."""
    factors = {name: estimator.factors[prefix + group] for group, names in groups.items() for name in names}
    return {name: value * factors.get(name, 1.0) for name, value in terms.items()}
