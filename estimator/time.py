"""Time of an optimizer step, term by term, for many configurations at once.

Sources: roofline, Williams et al. 2009; collectives as rings by latency and bandwidth, Thakur et al. 2005;
pipelines, Narayanan et al., arXiv:2104.04473; tensor and sequence parallelism, Korthikanti et al.,
arXiv:2205.05198.

| symbol | meaning |
|---|---|
| n | configurations, the length of an array |
| k | parts of a stage: block kinds first, then the parts outside blocks; the first axis of an array of shape (k, n) |
| m, p | micro-batches of a step (`accum`); pipeline stages (`pp`) |
| forward, backward | seconds of each pass of one micro-batch |
| f | share of the rate of products that is left under a power limit (`limited`) |

A term that several parts have is summed over k, weighted by the number of each part (`TimedRank.counts`), in `slot_of`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from ..knobs.layers import BlockStrategy
from .collectives import group
from .constants import Constants
from .exchanges import activation_transfers, data_parallel, offload_seconds, parameter_gathers, tied_sum, update_seconds
from .facts.model_facts import ModelFacts
from .hardware import Hardware
from .knob_arrays import KnobArrays
from .links import Links, TimedRank, boundary_width, residual_bytes
from .setup import TrainingSetup
from .slot import Slot, clocks, pipeline, slot_of
from .stages import Division, Group as StageGroup, Stage, divided, handovers
from .work import Work

TIME_TERMS = (
    "matmul", "attention", "memory-bound", "recomputation", "launches", "tensor parallel",
    "sequence exchange", "expert exchange", "expert imbalance", "data parallel",
    "parameter gathers", "pipeline transfers", "bubble", "optimizer", "offload", "stalls",
    "fixed",
)  # fmt: skip
"""Names of the terms, in the order of the breakdown."""
SLOW_HOST = "slow host"
"""Name of the additional time of a step on a host that is slower by one standard deviation, which is not part of the step."""
BINDS = {
    "matmul": "compute", "attention": "compute", "recomputation": "compute",
    "memory-bound": "memory bandwidth", "optimizer": "memory bandwidth", "launches": "launches",
    "fixed": "launches", "tensor parallel": "links", "sequence exchange": "links", "data parallel": "links",
    "parameter gathers": "links", "expert exchange": "links", "expert imbalance": "compute",
    "pipeline transfers": "links", "offload": "links", "stalls": "links",
    "bubble": "bubble",
}  # fmt: skip
"""Cause that is reported if a term is the largest."""


def step_time(
    facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware, constants: Constants,
    division: Division | None = None,
) -> Mapping[str, np.ndarray]:  # fmt: skip
    """Terms of one optimizer step, ms, by their names in `TIME_TERMS`; arrays of len(cols).

    They sum to the step; `SLOW_HOST` is a further one. `fixed` is infinite if a model has fewer blocks than stages.

    Args:
        division: `stages.divided` of these configurations, if known.
    """
    size = len(cols)
    terms_ms = {name: np.zeros(size) for name in (*TIME_TERMS, SLOW_HOST)}
    terms_ms["fixed"][:] = np.inf
    equal_stages, cuts = divided(facts, cols, setup.balance) if division is None else division
    timed_stages: list[_Timed] = []
    if equal_stages:  # the work of a part is the same in every stage
        work = Work.of(facts.parts, facts, cols, setup, hardware, constants)
        for equal in equal_stages:
            links = Links(facts, equal.cols, setup, hardware, constants)
            terms = _stage_time(equal.stage, links, equal.cols, work, equal.indices)
            timed_stages.append(_Timed(terms, equal.indices, equal.num_ranks, equal.cols))
    for cut in cuts:
        layers = cut.layers
        # Many stages of a pipeline do the same.
        keys = [
            (stage.first, stage.last, stage.sizes, tuple(layers[index] for index in stage.indices))
            for _, stage in cut.stages
        ]
        once = {
            key: _layered_time(groups, stage, layers, facts, cut.cols, setup, hardware, constants)
            for key, (groups, stage) in dict(zip(keys, cut.stages)).items()
        }
        for key, (_, stage) in zip(keys, cut.stages):
            timed_stages.append(
                _Timed(dict(once[key]), cut.indices, np.full(len(cut.indices), len(stage.ranks)), cut.cols)
            )
    _wait(timed_stages, size, hardware, constants)
    if hardware.shares_cores:
        # While one stage waits, the others compute on its core: the total time is that of all work.
        _share_cores(timed_stages, size)
    most = np.full(size, -np.inf)
    for timed in timed_stages:
        total = reduce(np.add, (timed.terms[name] for name in TIME_TERMS))
        slower = total > most[timed.indices]
        slowest = timed.indices[slower]
        most[slowest] = total[slower]
        for name in terms_ms:
            terms_ms[name][slowest] = timed.terms[name][slower] * 1e3
    return terms_ms


class _Timed(NamedTuple):
    """Terms of stages, s, as if each were the slowest of its configuration."""

    terms: dict[str, np.ndarray]
    indices: np.ndarray
    """Indices of the configurations."""
    num_ranks: np.ndarray
    """Number of ranks that each stage represents."""
    cols: KnobArrays


def _wait(timed_stages: Sequence[_Timed], size: int, hardware: Hardware, constants: Constants) -> None:
    """Sets the bubble: a stage idles while its first micro-batch passes through the other stages and the last one returns."""
    num_others = [np.maximum(timed.cols.pp - 1, 1) for timed in timed_stages]
    idle = [timed.terms["bubble"] / num_other for timed, num_other in zip(timed_stages, num_others)]
    pipeline_idle = np.zeros(size)
    for timed, stage_idle in zip(timed_stages, idle):
        pipeline_idle[timed.indices] += timed.num_ranks * stage_idle
    for timed, stage_idle in zip(timed_stages, idle):
        several = timed.cols.pp > 1
        if several.any():
            timed.terms["bubble"] = np.where(several, pipeline_idle[timed.indices] - stage_idle, timed.terms["bubble"])


def _share_cores(timed_stages: Sequence[_Timed], size: int) -> None:
    """Sets each term of a pipeline to its average over all stages, without the bubble."""
    ranks = np.zeros(size)
    for timed in timed_stages:
        ranks[timed.indices] += timed.num_ranks
    for name in TIME_TERMS:
        total = np.zeros(size)
        for timed in timed_stages:
            total[timed.indices] += timed.num_ranks * timed.terms[name]
        for timed in timed_stages:
            mean = total[timed.indices] / ranks[timed.indices] if name != "bubble" else 0.0
            timed.terms[name] = np.where(timed.cols.pp > 1, mean, timed.terms[name])


def stage_times(
    cut: list[Stage],
    facts: ModelFacts,
    cols: KnobArrays,
    setup: TrainingSetup,
    hardware: Hardware,
    constants: Constants,
) -> list[dict[str, np.ndarray]]:
    """Terms of one optimizer step, s, for each stage as if it were the slowest; all of `cols` have as many stages."""
    work = Work.of(facts.parts, facts, cols, setup, hardware, constants)
    links = Links(facts, cols, setup, hardware, constants)
    return [_stage_time(stage, links, cols, work) for stage in cut]


def _stage_time(
    stage: Stage, links: "Links", cols: KnobArrays, work: Work, indices: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Terms of one optimizer step, s, as if this stage were the slowest.

    Args:
        stage: the stage.
        links: of the configurations.
        cols: the configurations, with the recomputation of the stage.
        work: of all parts, for these configurations or for more.
        at: the configurations among those of `work`; None for all.
    """
    rank = TimedRank.of(stage, links, cols)
    rows = {id(part): row for row, part in enumerate(links.facts.parts)}
    own_work = work.take([rows[id(part)] for part in rank.parts], indices)
    slot = slot_of(rank, own_work)
    if links.limited < 1:
        slot = slot_of(rank, own_work.at_clocks(clocks(slot.products, slot.total - slot.products, links.limited)))
    transfer, bubble = pipeline(rank, slot)
    gathers, gathered = parameter_gathers(rank, slot.forward, slot.backward)
    exchanged = data_parallel(rank, slot.forward, np.maximum(slot.backward - gathered, 0.0))
    return _terms(rank, slot, gathers, exchanged, transfer, bubble)


def _terms(
    rank: "TimedRank",
    slot: "Slot",
    gathers: np.ndarray,
    exchanged: np.ndarray,
    transfer: np.ndarray,
    bubble: np.ndarray,
) -> dict[str, np.ndarray]:
    """The terms of a stage's step by their names."""
    accum, none = rank.accum, rank.none
    likely = stall_chance(rank.cols, rank.links.hardware, rank.links.constants) > 0.5
    return {
        "matmul": accum * slot.matmul,
        "attention": accum * slot.attention,
        "memory-bound": accum * slot.memory,
        "recomputation": accum * slot.again,
        "launches": accum * slot.launches,
        SLOW_HOST: accum * slot.slow_host,
        "tensor parallel": accum * slot.tensor,
        "sequence exchange": accum * slot.exchange,
        "expert exchange": accum * slot.rows,
        "expert imbalance": accum * slot.uneven,
        "data parallel": exchanged + tied_sum(rank),
        "parameter gathers": gathers,
        "pipeline transfers": transfer,
        "bubble": bubble,
        "optimizer": update_seconds(rank),
        "offload": offload_seconds(rank) + activation_transfers(rank, slot.forward, slot.backward),
        "stalls": np.where(likely, stall_seconds(rank.cols, rank.links.constants), none),
        "fixed": none + rank.links.constants.step_ms * 1e-3,
    }


def _layered_time(
    groups: Sequence[StageGroup], stage: Stage, layers: Sequence[BlockStrategy], facts: ModelFacts, cols: KnobArrays,
    setup: TrainingSetup, hardware: Hardware, constants: Constants,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Terms of one optimizer step, s, of a stage with groups of blocks that have different strategies.

    Work adds up. Communication overlaps with the work of all groups, in proportion to each group's share. If samples are
    distributed among ranks and gathered again, there is an all-gather in each direction (`schedule/parallel/sharing.py`).
    """
    ranks = [
        TimedRank.of(blocks, Links(facts, group_cols, setup, hardware, constants), group_cols)
        for blocks, group_cols in groups
    ]
    works = [Work.of(rank.parts, facts, rank.cols, setup, hardware, constants) for rank in ranks]
    stage_rank = TimedRank.of(stage, Links(facts, cols, setup, hardware, constants), cols)
    slot = _joined([slot_of(rank, work) for rank, work in zip(ranks, works, strict=True)], stage_rank.none)
    if stage_rank.links.limited < 1:
        share = clocks(slot.products, slot.total - slot.products, stage_rank.links.limited)
        slowed = [work.at_clocks(share) for work in works]
        slot = _joined([slot_of(rank, work) for rank, work in zip(ranks, slowed, strict=True)], stage_rank.none)
    for degree, times in handovers(stage, layers, int(cols.tp[0])).items():
        among = group(cols.tp // degree, np.full(len(cols), degree), stage_rank.links.devices, hardware, constants)
        moved = stage_rank.tokens * boundary_width(facts) * residual_bytes(facts)
        once = times * among.gather(moved, stage_rank.links.collective)
        slot.tensor, slot.forward, slot.backward = slot.tensor + 2 * once, slot.forward + once, slot.backward + once
    gathers, gathered = _hidden_behind(
        [partial(parameter_gathers, rank) for rank in ranks], slot.forward, slot.backward, stage_rank.none
    )
    remaining = np.maximum(slot.backward - gathered, 0.0)
    straggler_wait = stage_rank.links.straggler_wait

    def exchange(rank: TimedRank) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return lambda forward, backward: (data_parallel(rank, forward, backward) - straggler_wait, stage_rank.none)

    exchanged, _ = _hidden_behind([exchange(rank) for rank in ranks], slot.forward, remaining, stage_rank.none)
    transfer, bubble = pipeline(stage_rank, slot)
    terms = _terms(stage_rank, slot, gathers, exchanged + straggler_wait, transfer, bubble)
    terms["optimizer"] = sum((update_seconds(rank) for rank in ranks), stage_rank.none)
    copies = activation_transfers(stage_rank, slot.forward, slot.backward)
    terms["offload"] = sum((offload_seconds(rank) for rank in ranks), copies)
    return terms


def _joined(slots: "Sequence[Slot]", none: np.ndarray) -> "Slot":
    """The sums of a micro-batch's seconds over groups of blocks."""
    return Slot(**{name: sum((getattr(slot, name) for slot in slots), none) for name in Slot.__slots__})


def _hidden_behind(
    exchanges: Sequence[Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]],
    forward: np.ndarray,
    backward: np.ndarray,
    none: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over groups of their exchanges behind the passes: each of `exchanges`, called with the seconds of both passes, returns
    the exposed time of its exchange and its total time. Each group overlaps with its share of the passes."""
    bare = [exchange(none, none)[0] for exchange in exchanges]
    total = sum(bare, none)
    shares = [np.divide(seconds, total, where=total > 0, out=np.zeros_like(none)) for seconds in bare]
    exposed = [exchange(forward * share, backward * share) for exchange, share in zip(exchanges, shares)]
    return sum((seconds for seconds, _ in exposed), none), sum((busy for _, busy in exposed), none)


def stall_seconds(cols: KnobArrays, constants: Constants) -> np.ndarray:
    """Seconds that a stall of the network would add to a step, shape (n,)."""
    return (cols.grad_accum + cols.pp - 1) * 2.0 * np.minimum(cols.pp - 1, 2) * constants.stall_ms * 1e-3


def stall_chance(cols: KnobArrays, hardware: Hardware, constants: Constants) -> np.ndarray:
    """Chance that a run's pipeline stalls on the network, 0 to 1; see `Constants.stall_ms`."""
    nodes = cols.tp * cols.pp * cols.replicas / hardware.devices_per_node
    least = constants.stall_least
    chance = least + (1 - least) / (1 + (constants.stall_nodes / nodes) ** 6)
    if constants.stalls_without_zero:
        # More gradient rings beside the pipeline make a stall more likely.
        rings = 1 / (1 + (constants.stall_rings / (cols.replicas * nodes)) ** 3)
        chance = np.where((cols.zero == 0) & (cols.replicas > 1), np.maximum(chance, rings), chance)
    possible = (nodes > 1) & (cols.pp > 1) & (constants.stall_ms > 0)
    return np.where(possible, chance, 0.0)
