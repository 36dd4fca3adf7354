"""Division of a model's parts among the ranks of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import UsageError
from ..knobs.layers import BlockStrategy
from ..knobs.meaning import Placement, recomputed, stage_sizes
from .facts.model_facts import ModelFacts, Part
from .knob_arrays import KnobArrays, Split


@dataclass(frozen=True, slots=True)
class Stage:
    """The parts of a model on a rank of a pipeline: a stage, or several chunks of the model; or those of several identical
    ranks."""

    ranks: "tuple[int, ...] | tuple[np.ndarray, np.ndarray]"
    """The ranks with these parts, ascending; all of them if ranks are not distinguished. For stages of several configurations:
    the first and the last rank of each, shape (n,)."""
    blocks: "tuple[tuple[Part, float | np.ndarray], ...]"
    """Block kinds and the number of each: an average if a model has several kinds, since each stage is assumed to have its share
    of every kind. For stages of several configurations: shape (n,)."""
    first: bool
    """True if it has the embedding."""
    last: bool
    """True if it has head and loss."""
    ends: tuple[Part, ...]
    """Parts that are not blocks."""
    indices: tuple[int, ...]
    """Indices of its blocks in the model, for the first of the ranks."""
    sizes: tuple[int, ...]
    """Number of blocks in each of its chunks."""

    @property
    def count(self) -> int:
        """Number of its blocks."""
        return len(self.indices)

    @property
    def parts(self) -> "tuple[tuple[Part, float | np.ndarray], ...]":
        """All its parts, blocks first, and the number of each."""
        return (*self.blocks, *((end, end.count) for end in self.ends))

    def recomputed(self, ratio: float) -> float:
        """Share of its blocks that are recomputed at a checkpoint ratio, 0 to 1."""
        return sum(len(recomputed(size, ratio)) for size in self.sizes) / self.count if self.count else 0.0


@lru_cache(maxsize=4096)
def stage_blocks(blocks: int, pp: int, balance: str, head: float) -> tuple[int, ...]:
    """Blocks of each of `pp` stages.

    `layers` spreads them evenly. `cost` fills a stage until it has its share of the cost of all blocks and the head, which costs
    as much as `head` blocks; later stages may stay empty.
    """
    if balance == "layers":
        return tuple(stage_sizes(blocks, pp))
    total = blocks + head
    counts = [0] * pp
    stage, done = 0, 0.0
    for _ in range(blocks):
        counts[stage] += 1
        done += 1
        if done > total * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(counts)


def stages(
    facts: ModelFacts,
    pp: int,
    balance: str,
    *,
    chunks: int = 1,
    v_shaped: bool = False,
    distinct: bool = True,
    sizes: Sequence[int] | None = None,
) -> list[Stage]:
    """The parts on the ranks of a pipeline of `pp`, each with `chunks` stages: the distinct ones, or all.

    Returns an empty list if there are fewer blocks than stages.

    Args:
        sizes: number of blocks of each stage, in place of `balance`.

    Raises:
        UsageError: the sizes are for another number of blocks.
    """
    kinds = [model_part for model_part in facts.parts if model_part.role == "block"]
    blocks = sum(model_part.count for model_part in kinds)
    if pp * chunks > max(blocks, 1):
        return []
    front = tuple(model_part for model_part in facts.parts if model_part.role == "embedding")
    back = tuple(model_part for model_part in facts.parts if model_part.role in ("norm", "head", "loss", "other"))
    block_cost = sum(model_part.count * _cost(model_part) for model_part in kinds) / max(blocks, 1)
    head = sum(_cost(model_part) for model_part in back) / block_cost if block_cost else 0.0
    if sizes is not None and sum(sizes) != blocks:
        raise UsageError(f"stage_blocks: its numbers are for {sum(sizes)} blocks, but the model has {blocks}")
    counts = stage_blocks(blocks, pp * chunks, balance, head) if sizes is None else sizes
    distinct_stages: list[Stage] = []
    for share_of_rank in _shares(pp, chunks, v_shaped, tuple(counts), distinct):
        count = sum(share_of_rank.sizes)
        kinds_of_blocks = (
            tuple((model_part, count * model_part.count / blocks) for model_part in kinds) if blocks else ()
        )
        ends = (*(front if share_of_rank.first else ()), *(back if share_of_rank.last else ()))
        distinct_stages.append(Stage(blocks=kinds_of_blocks, ends=ends, **share_of_rank._asdict()))
    return distinct_stages


class _Share(NamedTuple):
    """The blocks on a rank of a pipeline, or on several ranks with as many; see the fields of `Stage`."""

    ranks: tuple[int, ...]
    first: bool
    last: bool
    indices: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=4096)
def _shares(pp: int, chunks: int, v_shaped: bool, counts: tuple[int, ...], distinct: bool) -> list[_Share]:
    """Returns the share of each rank of a pipeline whose stages have `counts` blocks; equal shares once if `distinct`."""
    placement, ends = Placement(pp * chunks, pp, v_shaped), [0, *accumulate(counts)]
    shares: dict[tuple[int, tuple[int, ...], bool, bool], _Share] = {}
    for rank in range(pp):
        held = placement.held(rank)
        indices = tuple(index for stage in held for index in range(ends[stage], ends[stage + 1]))
        sizes = tuple(counts[stage] for stage in held)
        opens, closes = 0 in held, pp * chunks - 1 in held
        key = (-1 if distinct else rank, sizes, opens, closes)
        equal = shares.get(key, _Share((), opens, closes, indices, sizes))
        shares[key] = equal._replace(ranks=(*equal.ranks, rank))
    return list(shares.values())


Group = tuple[Stage, KnobArrays]
"""Blocks of a stage with the same strategy, or the parts outside blocks, with the configurations that apply to them."""


def staged(facts: ModelFacts, split: Split, balance: str, cols: KnobArrays) -> list[tuple[list[Group], Stage]]:
    """Returns the parts on the ranks of a pipeline, in groups, and the stage as a whole.

    If blocks have their own strategies, all ranks are returned, since each may differ; otherwise the distinct ones, each as a
    single group.

    Raises:
        UsageError: the strategies are for another number of blocks.
    """
    layers = split.layers
    plain = layers is None
    rank_stages = stages(
        facts, split.pp, balance, chunks=split.chunks, v_shaped=split.v_shaped, distinct=plain, sizes=split.sizes
    )
    if layers is None:
        ratios, ratio_index = np.unique(cols.checkpoint_ratio, return_inverse=True)
        shares = [np.array([stage.recomputed(ratio) for ratio in ratios.tolist()]) for stage in rank_stages]
        return [
            ([(stage, cols.with_checkpoints(share[ratio_index]))], stage)
            for stage, share in zip(rank_stages, shares, strict=True)
        ]
    if len(layers) != facts.blocks:
        raise UsageError(f"strategy: its runs are for {len(layers)} blocks, but the model has {facts.blocks}")
    return [(_grouped(stage, layers, cols), stage) for stage in rank_stages]


class Cut(NamedTuple):
    """Configurations that divide the model among the ranks of a pipeline alike, and whose blocks have their own strategies."""

    layers: tuple[BlockStrategy, ...]
    indices: np.ndarray
    """Indices of the configurations."""
    cols: KnobArrays
    stages: list[tuple[list[Group], Stage]]
    """As from `staged`; empty if there are fewer blocks than stages."""


class EqualStages(NamedTuple):
    """Stages with the same parts, at most one of each configuration, whose blocks have the same strategy."""

    stage: Stage
    indices: np.ndarray
    """Indices of the configurations, shape (n,)."""
    cols: KnobArrays
    """These, with the recomputation of the stage."""
    num_ranks: np.ndarray
    """Number of ranks that each of the stages represents."""
    opens: np.ndarray
    """True for the first of the distinct stages of a configuration."""
    closes: np.ndarray
    """True for the last."""


class Division(NamedTuple):
    """The stages of many configurations."""

    equal: list[EqualStages]
    cuts: list[Cut]


def divided(facts: ModelFacts, cols: KnobArrays, balance: str) -> Division:
    """The stages of configurations. Those with the same parts are together, whatever the division, as arrays of the number of
    their blocks; configurations with fewer blocks than stages have none."""
    by_kind: dict[tuple[bool, bool, int], list[tuple[Stage, np.ndarray, np.ndarray, bool, bool]]] = {}
    cuts = []
    for split, indices in cols.splits():
        if split.layers is not None:
            cut_cols = cols.take(indices)
            cuts.append(Cut(split.layers, indices, cut_cols, staged(facts, split, balance, cut_cols)))
            continue
        cut = stages(facts, split.pp, balance, chunks=split.chunks, v_shaped=split.v_shaped, sizes=split.sizes)
        ratios, which = np.unique(cols.checkpoint_ratio[indices], return_inverse=True)
        seen: dict[tuple[bool, bool], int] = {}
        for number, stage in enumerate(cut):
            kind = (stage.first, stage.last)
            seen[kind] = seen.get(kind, 0) + 1
            share = np.array([stage.recomputed(ratio) for ratio in ratios.tolist()])[which]
            entry = (stage, indices, share, number == 0, number == len(cut) - 1)
            by_kind.setdefault((*kind, seen[kind]), []).append(entry)
    return Division([_together(entries, cols) for entries in by_kind.values()], cuts)


def _together(entries: Sequence[tuple[Stage, np.ndarray, np.ndarray, bool, bool]], cols: KnobArrays) -> EqualStages:
    """Stages with the same parts as one."""
    stages, places, shares, opens, closes = zip(*entries, strict=True)
    sizes = [len(indices) for indices in places]

    def of(values: Sequence[Any]) -> np.ndarray:
        return np.repeat(np.array(values), sizes)

    pattern, indices = stages[0], np.concatenate(places)
    blocks = tuple(
        (model_part, of([stage.blocks[kind][1] for stage in stages]).astype(float))
        for kind, (model_part, _) in enumerate(pattern.blocks)
    )
    low, high = of([stage.ranks[0] for stage in stages]), of([stage.ranks[-1] for stage in stages])
    return EqualStages(
        stage=replace(pattern, ranks=(low, high), blocks=blocks),
        indices=indices,
        cols=cols.take(indices).with_checkpoints(np.concatenate(shares)),
        num_ranks=of([len(stage.ranks) for stage in stages]),
        opens=of(opens),
        closes=of(closes),
    )


def _grouped(stage: Stage, layers: Sequence[BlockStrategy], cols: KnobArrays) -> list[Group]:
    """A stage in groups of blocks with the same strategy; parts outside blocks are in the group with the knobs' values."""
    by_layer: dict[BlockStrategy, list[int]] = {}
    for index in stage.indices:
        by_layer.setdefault(layers[index], []).append(index)
    held: dict[BlockStrategy, list[int]] = {}
    for layer, indices in by_layer.items():  # recomputation is a share of a group
        held.setdefault(replace(layer, ckpt=False), []).extend(indices)
    plain = BlockStrategy(ckpt=False, **cols.followed(0))
    groups: list[Group] = []
    for key, indices in {plain: held.pop(plain, []), **held}.items():
        follows_knobs = key == plain
        if not indices and not (follows_knobs and stage.ends):
            continue
        share = len(indices) / stage.count if stage.count else 0.0
        again = sum(layers[index].ckpt for index in indices) / len(indices) if indices else 0.0
        group = replace(
            stage,
            blocks=tuple((model_part, share * count) for model_part, count in stage.blocks) if indices else (),
            first=stage.first and follows_knobs,
            last=stage.last and follows_knobs,
            ends=stage.ends if follows_knobs else (),
            indices=tuple(sorted(indices)),
            sizes=(len(indices),),
        )
        groups.append((group, cols.of_group(key, again)))
    return groups


def handovers(stage: Stage, layers: Sequence[BlockStrategy], tp: int) -> dict[int, int]:
    """Number of runs of blocks in a stage that are divided over fewer than `tp` ranks, by that number of ranks: samples are
    distributed before each run and gathered after it."""
    runs: dict[int, int] = {}
    degree_before = None
    for position, index in enumerate(stage.indices):
        layer = layers[index]
        if position and index != stage.indices[position - 1] + 1:  # of another chunk
            degree_before = None
        if layer.tp not in (degree_before, tp):
            runs[layer.tp] = runs.get(layer.tp, 0) + 1
        degree_before = layer.tp
    return runs


def _cost(model_part: Part) -> float:
    return sum(item.k * item.n * item.count * item.rows for item in model_part.matmuls)


def in_flight(rank: "int | np.ndarray", pp: "int | np.ndarray", cols: KnobArrays) -> np.ndarray:
    """Micro-batches, of m in all, whose activations rank r of a pipeline of p stores at once, with v chunks a rank.

    - `gpipe`: m
    - `1f1b`: p - r (Narayanan et al., arXiv:2104.04473, section 2.2)
    - `interleaved`: (2 (p - 1 - r) + (v - 1) p + 1) / v, the forward passes before the first backward;
      in the first rank 1 + (p - 1) / (p v) times as many as 1F1B (Korthikanti et al., arXiv:2205.05198, section
      4.2.3)
    - `zero_bubble`, `zbv`: p, since activations that 1F1B frees in later ranks are kept there for the gradients of
      weights (Qi et al., arXiv:2401.10241, sections 2.3 and 6)
    """
    accum, chunks = cols.grad_accum.astype(float), cols.virtual_stages
    depth = np.zeros(len(cols)) + (pp - rank)
    rounds = (2 * (pp - 1 - rank) + (chunks - 1) * pp + 1) / chunks
    depth = np.where(cols.order_that("in_rounds"), rounds, depth)
    depth = np.where(cols.order_that("splits_backward"), pp, depth)
    # Without stages every micro-batch completes before the next.
    several = np.greater(pp, 1)
    return np.where(several & cols.order_that("waits"), accum, np.minimum(accum, np.where(several, depth, 1.0)))


def waiting(rank: "int | np.ndarray", cols: KnobArrays) -> np.ndarray:
    """Micro-batches of a rank whose backward pass is done except for the gradients of weights.

    `zero_bubble`: r, or with several chunks r of these (torch's ScheduleInterleavedZeroBubble; Qi et al., arXiv:2401.10241,
    section 2.3); `zbv`: none while activations are at their peak.
    """
    late = cols.order_that("splits_backward") & ~cols.order_that("v_shaped")
    delayed = np.where(late, rank / cols.virtual_stages, 0.0)
    return np.minimum(cols.grad_accum, delayed)


def crossings(pp: "int | np.ndarray", cols: KnobArrays) -> np.ndarray:
    """Boundaries between ranks that a micro-batch crosses in the forward pass, at the rank with the most.

    Two a chunk, except at the ends of the model and where a V turns within a rank: interleaving multiplies them by the chunks
    (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    chunks = cols.virtual_stages.astype(float)
    inner = np.minimum(np.subtract(pp, 1), 2)
    loop = np.where((chunks > 1) & np.equal(pp, 2), 2 * chunks - 1, chunks * inner)
    return np.where(cols.order_that("v_shaped"), chunks * inner, loop)


def idle_slot(
    slot: np.ndarray, forward: np.ndarray, backward: np.ndarray, of_weights: np.ndarray, hop: np.ndarray,
    cols: KnobArrays,
) -> np.ndarray:  # fmt: skip
    """Seconds for which each other stage waits for this one while the pipeline fills and drains.

    The bubble is their sum over the other stages: p - 1 times this if all are equal. F is the forward of a
    micro-batch on a rank, B the gradients of its inputs, W those of its weights, and v the number of the rank's chunks:

    - `1f1b`, `gpipe`: F + B + W (Narayanan et al., arXiv:2104.04473, section 2.2)
    - `interleaved`: (F + B + W) / v (likewise)
    - `zero_bubble`: (F + B - W) / v, a third of that if F = B = W (ZB-H1 of Qi et al., arXiv:2401.10241,
      section 2.3)
    - `zbv`: the maximum minus the minimum of F, B and W, as the bubble vanishes if they are equal (section
      6); but at least B / 2, since torch computes B and W of the model's first stage together

    The tests replay torch's order of actions.
    """
    chunks = cols.virtual_stages
    of_inputs = backward - of_weights
    largest = np.maximum(np.maximum(forward, of_inputs), of_weights)
    smallest = np.minimum(np.minimum(forward, of_inputs), of_weights)
    plain = (slot + 2 * hop) / chunks
    split = (np.maximum(slot - 2 * of_weights, 0.0) + 2 * hop) / chunks
    turning = np.maximum(largest - smallest, of_inputs / 2) + 2 * hop
    apart = np.where(cols.order_that("splits_backward"), split, plain)
    return np.where(cols.order_that("v_shaped"), turning, apart)
