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

A term that several parts have is summed over k, weighted by the number of each part (`_Rank.counts`), in `_slot`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import NamedTuple

import numpy as np

from ..knobs.layers import BlockStrategy
from ..knobs.meaning import EXCHANGES, FLOAT8, REDUCED, SUMMED, formats_of
from .collectives import Group, group, rates, sole_share
from .constants import Constants
from .experts import Rows, chosen, filled, uneven
from .facts.model_facts import Matmul, ModelFacts, Part, bytes_of
from .hardware import Hardware
from .kernels import attention_share, kernel_of, product_seconds, products_of
from .knob_arrays import KnobArrays
from .rank import BYTES, Formats, Rank, gathered_at, per_token, shared, tied_copy
from .sequences import all_to_alls, ring_waits
from .setup import TrainingSetup
from .stages import Division, Group as StageGroup, Stage, crossings, divided, handovers, idle_slot

TIME_TERMS = (
    "matmul", "attention", "memory-bound", "recomputation", "launches", "tensor parallel",
    "sequence exchange", "expert exchange", "expert imbalance", "data parallel",
    "parameter gathers", "pipeline transfers", "bubble", "optimizer", "offload", "stalls",
    "allocator retries", "fixed",
)  # fmt: skip
"""Names of the terms, in the order of the breakdown."""
BINDS = {
    "matmul": "compute", "attention": "compute", "recomputation": "compute",
    "memory-bound": "memory bandwidth", "optimizer": "memory bandwidth", "launches": "launches",
    "fixed": "launches", "tensor parallel": "links", "sequence exchange": "links", "data parallel": "links",
    "parameter gathers": "links", "expert exchange": "links", "expert imbalance": "compute",
    "pipeline transfers": "links", "offload": "links", "stalls": "links", "allocator retries": "allocator retries",
    "bubble": "bubble",
}  # fmt: skip
"""Cause that is reported if a term is the largest."""


def matmul_seconds(
    item: Matmul, tokens: np.ndarray, tp: np.ndarray, width: float, hardware: Hardware, precision: str,
    constants: Constants, ep: "np.ndarray | float" = 1.0, fill: "np.ndarray | float" = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One product on one rank: the forward, and the one or two of its backward.

    A rank has its share of the experts, with proportionally more rows, `fill` times those routed to them. Their products run as
    one, in tiles of rows that belong to one expert each.
    """
    shared = ep if item.experts > 1 else 1.0
    rows, count = (
        np.maximum(tokens * item.rows * shared * (fill if item.experts > 1 else 1.0), 1.0),
        item.count / shared,
    )
    k = item.k / (tp if item.split == "row" else 1.0)
    n = item.n / (tp if item.split == "column" else 1.0)
    peak = hardware.rate(precision)
    if hardware.kind == "cpu":
        few = constants.half_rows / rows
        if item.experts > 1:
            few = few * shared / item.experts + constants.tile_rows / 2 / rows
        shape = (1 + few) * (1 + constants.half_width / k) * (1 + constants.half_width / n)
        compute = 2 * rows * k * n / (peak * hardware.achievable * constants.matmul_efficiency) * shape
        moved = width * (rows * k + k * n + rows * n) / _bandwidth(hardware, constants)
        forward = count * np.maximum(compute, moved)
        return forward, forward * (2 if item.trainable else 1)
    like = products_of(hardware)
    narrow = precision in NARROW
    one_like = partial(
        product_seconds,
        width=1 if narrow else width,
        peak=peak,
        bandwidth=hardware.memory_gb_per_s * 1e9,
        like=like,
        share=constants.matmul_efficiency * (constants.eight_bit_efficiency if narrow else 1.0),
    )
    if item.experts > 1:
        group = item.experts / shared
        weights = group * width * k * n / _bandwidth(hardware, constants)
        filled = (rows + constants.tile_rows / 2) * group
        forward = np.maximum(one_like(filled, n, k), weights)
        back = np.maximum(one_like(filled, k, n), weights)
        if item.trainable:
            back = back + one_like(k * group, n, rows + constants.tile_rows / 2)
        return count / group * forward, count / group * back
    back = one_like(rows, k, n)
    if item.trainable:
        back = back + one_like(k, n, rows)
    return count * one_like(rows, n, k), count * back


NARROW = (*FLOAT8, "mxfp8", "nvfp4")
"""8-bit and 4-bit formats of products."""
CAST = {"mxfp8": 5.0, "nvfp4": 8.0}
"""Bytes moved to cast a 16-bit number to fewer bits with scales, in both layouts; for 4 bits this includes rotation and random
rounding."""


RING_MERGE = (18.0, 14.0)
"""Bytes moved for a number of attention's output for each block of keys in a ring: the forward pass scales it and adds the new
part, in float32; the backward pass adds to the gradient of the queries."""


def _bandwidth(hardware: Hardware, constants: Constants) -> float:
    return hardware.memory_gb_per_s * 1e9 * constants.bandwidth_efficiency


@dataclass(slots=True)
class _Work:
    """Seconds of one micro-batch in k parts, forward and backward. Arrays, shape (k, n); shape (n,) for a single part."""

    matmul: np.ndarray
    attention: np.ndarray
    memory: np.ndarray
    matmul_back: np.ndarray
    attention_back: np.ndarray
    memory_back: np.ndarray
    host: np.ndarray
    """Host time of the forward's launches."""
    experts: np.ndarray
    """The part of the products that belongs to experts, forward."""
    experts_back: np.ndarray

    @classmethod
    def of(
        cls, model_parts: Sequence[Part], facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware,
        constants: Constants,
    ) -> "_Work":  # fmt: skip
        """The work of these parts, a row each."""
        distinct = _distinct(cols)
        works = [_part_work(part, facts, cols, setup, hardware, constants, distinct) for part in model_parts]
        return cls(**{name: np.stack([getattr(work, name) for work in works]) for name in cls.__slots__})

    def take(self, rows: Sequence[int], indices: np.ndarray | None = None) -> "_Work":
        """The work of the parts in `rows`, for the configurations at `indices`, or for all if it is None."""
        chosen = list(rows) if indices is None else np.ix_(np.array(rows), indices)
        return _Work(*(getattr(self, name)[chosen] for name in _Work.__slots__))

    def at_clocks(self, share: np.ndarray) -> "_Work":
        """A copy with products and attention at a share of their rate."""
        limited = ("matmul", "attention", "matmul_back", "attention_back", "experts", "experts_back")
        return replace(self, **{name: getattr(self, name) / share for name in limited})


class _ProductWork(NamedTuple):
    """Seconds of the matrix products of one part, and the elements that they read and write. Arrays of shape (n,)."""

    forward: np.ndarray
    backward: np.ndarray
    experts: np.ndarray
    """The part of `forward` that belongs to experts."""
    experts_back: np.ndarray
    inputs: np.ndarray
    """Elements of a token in the products' inputs."""
    outputs: np.ndarray


def _part_work(
    part: Part,
    facts: ModelFacts,
    cols: KnobArrays,
    setup: TrainingSetup,
    hardware: Hardware,
    constants: Constants,
    distinct: tuple[np.ndarray, np.ndarray],
) -> _Work:
    """The work of one part; arrays of shape (n,)."""
    tp = cols.tp.astype(float)
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq) / cols.sequence_ranks
    zero = np.zeros(len(tp))
    half = "fp16" if setup.products == "fp16" else "bf16" if facts.precision in FLOAT8 else facts.precision
    kind_of_product = (setup.products or facts.precision) if part.role == "block" else half
    products = _product_work(part, facts, cols, tokens, hardware, kind_of_product, constants, distinct)
    attention, eager = zero, part.saved.scores > 0
    if part.attention is not None:
        kind = part.attention
        flops = 4.0 * tokens * seq * kind.heads * kind.head_dim / tp
        if kind.causal and not eager:
            flops = flops / 2
        share = constants.eager_attention_efficiency
        if not eager:
            kernel = setup.attention_kernel or (kernel_of(facts.attention) if facts.traced else "flash2")
            # In a ring, a kernel gets the keys of one rank at a time.
            share = constants.attention_efficiency or attention_share(hardware, kernel, seq / cols.cp, kind.head_dim)
        attention = flops / (hardware.rate(half) * share)
    memory, memory_back = _traffic(part, cols, tokens, setup, hardware, constants, products)
    chunks = np.maximum(np.ceil(tokens / part.chunk), 2.0) if part.chunk else 1.0
    launched = zero + part.kernels * chunks
    if setup.separate_experts:
        launched = launched + sum(item.experts for item in part.matmuls if item.experts > 1) / cols.ep
    return _Work(
        matmul=products.forward,
        attention=zero + attention,
        memory=memory,
        matmul_back=products.backward,
        # Fused kernels compute the scores again, a fifth product beside the four of backward.
        attention_back=zero + (2.0 if eager else 2.5) * attention,
        memory_back=memory_back,
        host=launched * constants.launch_us * 1e-6,
        experts=products.experts,
        experts_back=products.experts_back,
    )


def _product_work(
    part: Part,
    facts: ModelFacts,
    cols: KnobArrays,
    tokens: np.ndarray,
    hardware: Hardware,
    precision: str,
    constants: Constants,
    distinct: tuple[np.ndarray, np.ndarray],
) -> _ProductWork:
    """The products of one part. Each set of sizes is computed once, at its `distinct` representative, as this takes most of the
    time of a table."""
    tp = cols.tp.astype(float)
    zero = np.zeros(len(tp))
    matmul, back, experts, experts_back, inputs, outputs = zero, zero, zero, zero, zero, zero
    (representatives, representative_of), fill = distinct, filled(cols)
    dense = tokens[representatives], tp[representatives]
    of_experts = (tokens / cols.token_splits)[representatives], cols.expert_tp[representatives].astype(float)
    for item in part.matmuls:
        forward_seconds, backward_seconds = (
            seconds[representative_of]
            for seconds in matmul_seconds(
                item,
                *(of_experts if item.experts > 1 else dense),
                bytes_of(facts.precision),
                hardware,
                precision,
                constants,
                cols.ep[representatives],
                fill[representatives],
            )
        )
        matmul, back = matmul + forward_seconds, back + backward_seconds
        if item.experts > 1:
            experts, experts_back = experts + forward_seconds, experts_back + backward_seconds
        inputs = inputs + item.count * item.rows * item.k / (tp if item.split == "row" else 1.0)
        outputs = outputs + item.count * item.rows * item.n / (tp if item.split == "column" else 1.0)
    return _ProductWork(matmul, back, experts, experts_back, inputs, outputs)


def _traffic(
    part: Part, cols: KnobArrays, tokens: np.ndarray, setup: TrainingSetup, hardware: Hardware, constants: Constants,
    products: _ProductWork,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Seconds, forward and backward, of the operations of one part that the memory bandwidth bounds; arrays of shape (n,)."""
    tp, seq = cols.tp.astype(float), setup.seq_len or 1
    sequence = np.where(cols.sequence_parallel, tp, 1.0)
    bandwidth = _bandwidth(hardware, constants) / (constants.loss_traffic if part.role == "loss" else 1.0)
    memory = per_token(part.traffic, part, tp, sequence, cols.token_splits, seq) * tokens / bandwidth
    if part.traffic_backward is None:
        memory_back = 2 * memory
    else:
        memory_back = per_token(part.traffic_backward, part, tp, sequence, cols.token_splits, seq) * tokens / bandwidth
    casts = part.traffic_fixed / tp / bandwidth  # of weights, then of their gradients
    memory, memory_back = memory + casts, memory_back + casts
    if part.attention is not None:
        merged = (cols.cp - 1) * tokens * part.attention.heads * part.attention.head_dim / tp / bandwidth
        memory, memory_back = memory + RING_MERGE[0] * merged, memory_back + RING_MERGE[1] * merged
    if setup.products in NARROW and part.role == "block":
        cast = CAST.get(str(setup.products), 4.0) * tokens / bandwidth
        memory, memory_back = memory + cast * products.inputs, memory_back + cast * products.outputs
    return memory, memory_back


def _distinct(cols: KnobArrays) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first configuration of each set of product sizes, and for each configuration its index among these."""
    sizes = ((cols.micro_batch * 4096 + cols.tp) * 4096 + cols.sequence_ranks) * 65536 + cols.ep
    for column in (cols.capacity_factor, cols.token_splits):
        if (column != column[0]).any():
            values, which = np.unique(column, return_inverse=True)
            sizes = sizes * len(values) + which
    _, representatives, representative_of = np.unique(sizes, return_index=True, return_inverse=True)
    return representatives, representative_of


def step_time(
    facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware, constants: Constants,
    division: Division | None = None,
) -> Mapping[str, np.ndarray]:  # fmt: skip
    """Terms of one optimizer step, ms, by their names in `TIME_TERMS`; arrays of len(cols).

    They sum to the step. `fixed` is infinite if a model has fewer blocks than stages.

    Args:
        division: `stages.divided` of these configurations, if known.
    """
    size = len(cols)
    terms_ms = {name: np.zeros(size) for name in TIME_TERMS}
    terms_ms["fixed"][:] = np.inf
    equal_stages, cuts = divided(facts, cols, setup.balance) if division is None else division
    timed_stages: list[_Timed] = []
    if equal_stages:  # the work of a part is the same in every stage
        work = _Work.of(facts.parts, facts, cols, setup, hardware, constants)
        for equal in equal_stages:
            links = _Links(facts, equal.cols, setup, hardware, constants)
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
        total = reduce(np.add, timed.terms.values())
        slower = total > most[timed.indices]
        slowest = timed.indices[slower]
        most[slowest] = total[slower]
        for name in TIME_TERMS:
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
    work = _Work.of(facts.parts, facts, cols, setup, hardware, constants)
    links = _Links(facts, cols, setup, hardware, constants)
    return [_stage_time(stage, links, cols, work) for stage in cut]


def _travels(cols: KnobArrays, form: Formats, setup: TrainingSetup, precision: str) -> np.ndarray:
    """Bytes of an element of a gradient in the exchange between replicas, shape (n,)."""
    if not setup.own:
        return np.full(len(cols), float(BYTES[setup.reduce_dtype] if setup.reduce_dtype else form.gradient))
    wide, narrow = (BYTES[formats_of({"precision": precision, "reduce_dtype": dtype}).reduced] for dtype in REDUCED)
    return np.where(cols.reduce_dtype == "bf16", float(narrow), float(wide))


def _stage_time(
    stage: Stage, links: "_Links", cols: KnobArrays, work: _Work, indices: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Terms of one optimizer step, s, as if this stage were the slowest.

    Args:
        stage: the stage.
        links: of the configurations.
        cols: the configurations, with the recomputation of the stage.
        work: of all parts, for these configurations or for more.
        at: the configurations among those of `work`; None for all.
    """
    rank = _Rank.of(stage, links, cols)
    rows = {id(part): row for row, part in enumerate(links.facts.parts)}
    own_work = work.take([rows[id(part)] for part in rank.parts], indices)
    slot = _slot(rank, own_work)
    if links.limited < 1:
        slot = _slot(rank, own_work.at_clocks(clocks(slot.products, slot.total - slot.products, links.limited)))
    transfer, bubble = _pipeline(rank, slot)
    gathers, gathered = _parameter_gathers(rank, slot.forward, slot.backward)
    exchanged = _data_parallel(rank, slot.forward, np.maximum(slot.backward - gathered, 0.0))
    return _terms(rank, slot, gathers, exchanged, transfer, bubble)


def _terms(
    rank: "_Rank", slot: "_Slot", gathers: np.ndarray, exchanged: np.ndarray, transfer: np.ndarray, bubble: np.ndarray
) -> dict[str, np.ndarray]:
    """The terms of a stage's step by their names."""
    accum, none = rank.accum, rank.none
    return {
        "matmul": accum * slot.matmul,
        "attention": accum * slot.attention,
        "memory-bound": accum * slot.memory,
        "recomputation": accum * slot.again,
        "launches": accum * slot.launches,
        "tensor parallel": accum * slot.tensor,
        "sequence exchange": accum * slot.exchange,
        "expert exchange": accum * slot.rows,
        "expert imbalance": accum * slot.uneven,
        "data parallel": exchanged + _tied(rank),
        "parameter gathers": gathers,
        "pipeline transfers": transfer,
        "bubble": bubble,
        "optimizer": _update(rank),
        "offload": _offload(rank),
        "stalls": _stalls(rank.cols, rank.links.hardware, rank.links.constants),
        "allocator retries": none,
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
        _Rank.of(blocks, _Links(facts, group_cols, setup, hardware, constants), group_cols)
        for blocks, group_cols in groups
    ]
    works = [_Work.of(rank.parts, facts, rank.cols, setup, hardware, constants) for rank in ranks]
    stage_rank = _Rank.of(stage, _Links(facts, cols, setup, hardware, constants), cols)
    slot = _joined([_slot(rank, work) for rank, work in zip(ranks, works, strict=True)], stage_rank.none)
    if stage_rank.links.limited < 1:
        share = clocks(slot.products, slot.total - slot.products, stage_rank.links.limited)
        slowed = [work.at_clocks(share) for work in works]
        slot = _joined([_slot(rank, work) for rank, work in zip(ranks, slowed, strict=True)], stage_rank.none)
    for degree, times in handovers(stage, layers, int(cols.tp[0])).items():
        among = group(cols.tp // degree, np.full(len(cols), degree), stage_rank.links.devices, hardware, constants)
        moved = stage_rank.tokens * _hidden(facts) * _residual(facts)
        once = times * among.gather(moved, stage_rank.links.collective)
        slot.tensor, slot.forward, slot.backward = slot.tensor + 2 * once, slot.forward + once, slot.backward + once
    gathers, gathered = _hidden_behind(
        [partial(_parameter_gathers, rank) for rank in ranks], slot.forward, slot.backward, stage_rank.none
    )
    remaining = np.maximum(slot.backward - gathered, 0.0)
    straggler_wait = stage_rank.links.straggler_wait

    def exchange(rank: _Rank) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return lambda forward, backward: (_data_parallel(rank, forward, backward) - straggler_wait, stage_rank.none)

    exchanged, _ = _hidden_behind([exchange(rank) for rank in ranks], slot.forward, remaining, stage_rank.none)
    transfer, bubble = _pipeline(stage_rank, slot)
    terms = _terms(stage_rank, slot, gathers, exchanged + straggler_wait, transfer, bubble)
    terms["optimizer"] = sum((_update(rank) for rank in ranks), stage_rank.none)
    terms["offload"] = sum((_offload(rank) for rank in ranks), stage_rank.none)
    return terms


def _joined(slots: "Sequence[_Slot]", none: np.ndarray) -> "_Slot":
    """The sums of a micro-batch's seconds over groups of blocks."""
    return _Slot(**{name: sum((getattr(slot, name) for slot in slots), none) for name in _Slot.__slots__})


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


@dataclass(frozen=True)
class _Links:
    """Groups of ranks that communicate, and prices that do not depend on the stage. Arrays of len(cols)."""

    facts: ModelFacts
    cols: KnobArrays
    setup: TrainingSetup
    hardware: Hardware
    constants: Constants

    def _group(self, size: np.ndarray, stride: np.ndarray) -> Group:
        return group(size, stride, self.devices, self.hardware, self.constants)

    @cached_property
    def devices(self) -> np.ndarray:
        """Devices of the training."""
        return self.cols.tp.astype(float) * self.cols.replicas.astype(float) * self.cols.pp

    @cached_property
    def switch(self) -> float:
        """Seconds that ranks on one core wait for each other at a collective or a hop."""
        return self.constants.switch_us * 1e-6 if self.hardware.shares_cores else 0.0

    @cached_property
    def collective(self) -> float:
        """Seconds of a collective beyond those of its bytes and its ring."""
        return self.constants.collective_us * 1e-6 + self.switch

    @cached_property
    def between_stages(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Rates of ranks of two stages on one node and on different ones, bytes/s, and True where a pipeline crosses nodes."""
        hardware, stage = self.hardware, self.cols.tp * self.cols.replicas
        share = sole_share(np.maximum(hardware.devices_per_node // stage, 1), hardware)
        near, network_rate = rates(hardware, self.constants)
        return near, share * network_rate, stage * self.cols.pp > hardware.devices_per_node

    @cached_property
    def heads(self) -> Rows:
        """Ranks that exchange heads."""
        return Rows.of(self._group(self.cols.sp, self.cols.tp), self.cols.tp, self.hardware, self.constants)

    @cached_property
    def ring(self) -> Group:
        """Ranks that pass keys and values around a ring: from rank to rank, so that one crosses to the next node, over its
        share of the network."""
        stride = self.cols.tp * self.cols.sp
        return group(self.cols.cp, stride, self.devices, self.hardware, self.constants, sole=True)

    @cached_property
    def data(self) -> Group:
        """Replicas that share pieces. They are adjacent; HSDP has several such groups."""
        return self._group(self.cols.shard_ranks, self.cols.tp)

    @cached_property
    def groups(self) -> Group:
        """Replicas with the same pieces in the groups of HSDP."""
        return self._group(self.cols.hsdp, self.cols.tp * self.cols.shard_ranks)

    @cached_property
    def experts(self) -> Rows:
        """Ranks that share experts."""
        return Rows.of(
            self._group(self.cols.ep, self.cols.expert_tp), self.cols.expert_tp, self.hardware, self.constants
        )

    @cached_property
    def expert_dp(self) -> Group:
        """Ranks with the same experts."""
        return self._group(self.cols.expert_dp, self.cols.expert_tp * self.cols.ep)

    @cached_property
    def uses(self) -> dict[str, bool]:
        """For `sp`, `cp`, `ep`, `token_splits` and `hsdp`: True if some configuration has more than one."""
        return {name: bool((getattr(self.cols, name) > 1).any()) for name in ("sp", "cp", "ep", "token_splits", "hsdp")}

    @property
    def separate_experts(self) -> bool:
        """True if the experts of some configuration have other groups of replicas than its other weights."""
        return self.uses["ep"] or self.uses["token_splits"]

    @cached_property
    def straggler_wait(self) -> np.ndarray:
        """Seconds that all ranks wait for the slowest of them."""
        nodes = np.maximum(self.devices / self.hardware.devices_per_node, 1.0)
        return np.where(self.devices > 1, self.constants.straggler_ms * 1e-3 * np.log2(nodes), 0.0)

    @cached_property
    def tensor_pair(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a pair of tensor parallelism's collectives, and those of the host to start it.

        Two all-reduces a block in each pass, or as many pairs of all-gather and reduce-scatter (of the same bytes) under sequence
        parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
        """
        cols, tp = self.cols, self.cols.tp.astype(float)
        tensor = self._group(cols.tp, np.ones(len(tp), int))
        tokens = cols.micro_batch * float(self.setup.seq_len or 1) / cols.sequence_ranks
        moved = tokens * _hidden(self.facts) * bytes_of(self.facts.precision)
        pair = np.where(
            cols.sequence_parallel, 2 * tensor.gather(moved, self.collective), tensor.reduce(moved, self.collective)
        )
        start = np.where(tp > 1, 2 * self.constants.launch_us * 1e-6, 0.0)
        if (cols.pp > 1).any():
            crossing = (cols.pp > 1) & (self.devices > self.hardware.devices_per_node)
            step = self.constants.ring_step_with_pipeline_us
            start = start + np.where(crossing, 2 * (tp - 1) * step * 1e-6, 0.0)
        if self.setup.overlap_tensor:
            pair = pair * (1 - self.constants.overlap_tensor)
        return pair, start

    @cached_property
    def limited(self) -> float:
        """Share of the rate of products that is left if a device runs nothing else."""
        rate = self.constants.limited_rate
        return products_of(self.hardware).sustained if rate is None else rate


@dataclass(frozen=True)
class _Rank(Rank):
    """A rank with its links."""

    links: _Links

    @classmethod
    def of(cls, stage: Stage, links: _Links, cols: KnobArrays) -> "_Rank":
        """A rank of a stage; `cols` may differ from those of the links in their recomputation."""
        return cls(stage, links.facts, cols, links.setup, links)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the stage, blocks first."""
        return (*(part for part, _ in self.stage.blocks), *self.stage.ends)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of each, shape (k, n)."""
        counts = (*(count for _, count in self.stage.blocks), *(part.count for part in self.stage.ends))
        return np.stack([self.none + count for count in counts])

    @cached_property
    def of_block(self) -> np.ndarray:
        """1 for repeated blocks, otherwise 0; shape (k, 1)."""
        return np.array([[1.0 if part.role == "block" else 0.0] for part in self.parts])

    @cached_property
    def pairs(self) -> np.ndarray:
        """Pairs of tensor parallelism's collectives in the forward pass of each part, shape (k, 1) or (k, n)."""
        usual = {"block": 2.0, "embedding": 1.0, "head": 1.0}
        pairs = np.array([[usual.get(part.role, 0.0)] for part in self.parts])
        if not self.links.uses["token_splits"]:
            return pairs
        # Ranks that divide tokens among whole experts gather outputs, or nothing with sequence parallelism.
        less = np.where(self.cols.sequence_parallel, 1.0, 1.5)
        has = np.array([[part.experts > 0] for part in self.parts])
        return np.where(has & (self.cols.token_splits > 1), less, pairs)

    def gathers(self, width: "np.ndarray | float", pieces: "np.ndarray | float" = 1.0) -> np.ndarray:
        """Seconds of all-gathers of the rank's weights at `width` bytes, or of reduce-scatters; experts that others share are
        gathered among the replicas with the same ones."""
        links = self.links
        together = links.data.gather((self.weights - self.expert_weights) * width, links.collective, pieces)
        if not links.separate_experts:
            return together
        separate = links.expert_dp.gather(self.expert_weights * width, links.collective, pieces)
        return together + np.where(self.expert_weights > 0, separate, 0.0)

    @cached_property
    def exchanges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of each part's exchange of heads and of its experts' rows, and the excess of the fullest expert's rows over the
        mean; shape (k, n) each, (k, 1) for none."""
        links, width, none = self.links, bytes_of(self.facts.precision), np.zeros((len(self.parts), 1))
        heads, rows, excess = none, none, none
        if links.uses["sp"]:
            heads = np.stack([all_to_alls(self, part, links.heads, links.collective) for part in self.parts])
        if links.uses["ep"]:
            equal, share = self.cols.capacity_factor > 0, width * filled(self.cols) / self.cols.token_splits
            rows = np.stack(
                [
                    2
                    * links.experts.seconds(
                        self.tokens * part.routed * share,
                        links.collective,
                        equal,
                        chosen(part) if self.setup.rows_once_a_node else 0.0,
                    )
                    for part in self.parts
                ]
            )
            excess = np.stack([uneven(part, self.cols, links.constants) - 1 for part in self.parts])
        return heads, rows, excess

    @cached_property
    def pieces(self) -> np.ndarray:
        """Number of pieces: gradients and weights are sent block by block, with the parameters outside blocks as one more."""
        return self.none + 1.0 + sum(count for _, count in self.stage.blocks)

    @cached_property
    def owned(self) -> np.ndarray:
        """Parameters that the rank updates."""
        return self.held(shared("optimizer", self.cols.zero)) * self.trained_share

    @cached_property
    def states(self) -> np.ndarray:
        """Bytes of all states of these parameters, read and written once."""
        form = self.form
        return self.owned * (2 * form.optimizer + 2 * (form.master or form.parameter) + form.gradient)


@dataclass(slots=True)
class _Slot:
    """Seconds of one micro-batch on a rank, forward and backward, by kind; then those of each pass, and the part of the
    backward's products that computes gradients of weights."""

    matmul: np.ndarray
    attention: np.ndarray
    memory: np.ndarray
    again: np.ndarray
    """Recomputation."""
    products: np.ndarray
    """All products and attention, recomputed ones included."""
    launches: np.ndarray
    """Time that device and links wait for the host."""
    tensor: np.ndarray
    """Collectives of tensor parallelism."""
    exchange: np.ndarray
    """Exchanges around attention among ranks that share sequences: all-to-alls, and the part of a ring that attention does not
    hide."""
    rows: np.ndarray
    """Exchanges of rows between ranks that share experts."""
    uneven: np.ndarray
    """Time that the other ranks wait for the one whose experts get the most rows."""
    forward: np.ndarray
    backward: np.ndarray
    of_weights: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of the micro-batch."""
        links = self.tensor + self.exchange + self.rows + self.uneven
        return self.matmul + self.attention + self.memory + self.again + self.launches + links


def clocks(products: np.ndarray, other_seconds: np.ndarray, limited: float) -> np.ndarray:
    """Share of the rate of products under a power limit: `limited` if a device runs only products, close to 1 if it runs few of
    them.

    Clocks follow the power averaged over about ten milliseconds, so they fall in proportion to the share of time that products
    take at the resulting clocks: f = 1 - (1 - limited) * (products / f) / (products / f + other_seconds).
    """
    gap = other_seconds - products
    root = np.sqrt(gap**2 + 4 * other_seconds * products * limited)
    idle, busy = np.maximum(2 * other_seconds, 1e-30), np.maximum(root - gap, 1e-30)
    # Two forms of the same root of a quadratic, each used where it is free of cancellation; a stage may be empty.
    share = np.where(gap > 0, (gap + root) / idle, 2 * limited * products / busy)
    return np.where(products > 0, share, 1.0)


def _slot(rank: _Rank, work: _Work) -> _Slot:
    """One micro-batch: device and links run one after the other, and take at least as long as the host's launches.

    Under sequence parallelism, backward gathers the inputs of products again. All arrays are of shape (k, n) until they are
    summed over the parts.
    """
    pair, start = rank.links.tensor_pair
    pairs, blocks, counts = rank.pairs, rank.of_block, rank.counts
    regathered = np.where(rank.cols.sequence_parallel, 1.0, 0.0)
    ratio = blocks * rank.cols.checkpoint_ratio
    exchange, rows, late = rank.exchanges
    around = around_back = np.zeros((len(counts), 1))
    if rank.links.uses["cp"]:
        ring, fixed = rank.links.ring, rank.links.collective
        waits = [
            ring_waits(rank, part, ring, fixed, work.attention[k], work.attention_back[k])
            for k, part in enumerate(rank.parts)
        ]
        around, around_back = (np.stack(seconds) for seconds in zip(*waits, strict=True))
    forward = work.matmul + work.attention + work.memory
    computed = work.matmul_back + work.attention_back
    backward = computed + work.memory_back
    there = exchange + around + rows + late * work.experts
    home = exchange + around_back + rows + late * work.experts_back
    ahead = pairs * pair
    back = ahead * (1 + regathered / 2)
    rebuilt, of_products = ratio * forward, ratio * (work.matmul + work.attention)
    again = ratio
    if rank.setup.keeps_products:
        unrecomputed = blocks - ratio
        rebuilt = rebuilt + unrecomputed * (work.matmul / 2 + work.memory)
        of_products = of_products + unrecomputed * work.matmul / 2
        again = blocks + (1 - blocks) * ratio
    links = back + ratio * (ahead + there) + home
    host = work.host + pairs * start
    host_back = (2 + again) * work.host + pairs * (1 + regathered / 2 + ratio) * start
    slack = np.maximum(host - forward - ahead - there, 0.0)
    slack_back = np.maximum(host_back - backward - rebuilt - links, 0.0)

    def total(seconds: np.ndarray) -> np.ndarray:
        return (counts * seconds).sum(axis=0)

    return _Slot(
        matmul=total(work.matmul + work.matmul_back),
        attention=total(work.attention + work.attention_back),
        memory=total(work.memory + work.memory_back),
        again=total(rebuilt),
        products=total(work.matmul + work.attention + computed + of_products),
        launches=total(slack + slack_back),
        tensor=total(ahead + back + ratio * ahead),
        exchange=total((1 + ratio) * (exchange + around) + exchange + around_back),
        rows=total((2 + ratio) * rows),
        uneven=total(late * ((1 + ratio) * work.experts + work.experts_back)),
        forward=total(forward + ahead + there + slack),
        backward=total(backward + rebuilt + links + slack_back),
        of_weights=total(work.matmul_back - work.matmul),
    )


def _pipeline(rank: _Rank, slot: _Slot) -> tuple[np.ndarray, np.ndarray]:
    """Transfers between stages, m crossings of each boundary in each direction, and the bubble (`idle_slot`)."""
    several = rank.cols.pp > 1
    if not several.any():
        return rank.none, rank.none
    hardware, constants, cols = rank.links.hardware, rank.links.constants, rank.cols
    sequence = np.where(cols.sequence_parallel | rank.setup.scatter_transfers, rank.tp, 1.0)
    moved = rank.tokens * _hidden(rank.facts) * _residual(rank.facts) / sequence
    near_rate, far_rate, crosses = rank.links.between_stages
    near, far = moved / near_rate, moved / far_rate
    # Of the boundaries of a stage that is smaller than a node, one at most is between nodes.
    other_boundaries = np.where(rank.tp * rank.replicas >= hardware.devices_per_node, 0, np.clip(cols.pp - 2, 0, 1))
    hop = np.where(crosses, (far + other_boundaries * near) / (1 + other_boundaries), near)
    hop = hop + constants.hop_ms * 1e-3 + rank.links.switch
    exposed = 1 - constants.max_overlap if rank.setup.overlap_transfers else 1.0
    transfer = exposed * rank.accum * 2.0 * crossings(cols.pp, cols) * hop
    idle = idle_slot(slot.total, slot.forward, slot.backward, slot.of_weights, hop, cols)
    return np.where(several, transfer, 0.0), (cols.pp - 1) * idle


def _data_parallel(rank: _Rank, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Time that backward does not hide of the gradients' reduction, the gather of weights after the update, and the wait of all
    ranks for the slowest.

    Gradients are reduced by an all-reduce if replicas are whole, otherwise by a reduce-scatter, block by block from ZeRO 2 on
    (Rajbhandari et al., arXiv:1910.02054, section 7). HSDP also sums pieces over the groups, with every micro-batch or the last.
    """
    links, cols, setup, zero = rank.links, rank.cols, rank.setup, rank.cols.zero
    constants, form = links.constants, rank.form
    travels, trained = _travels(cols, form, setup, rank.facts.precision), rank.trained_share
    gradient = rank.trained * travels
    scatter = rank.gathers(travels, np.where(zero >= 2, rank.pieces, 1.0)) * trained
    gather = rank.gathers(form.parameter) * trained
    if setup.overlap_gathers:
        gather = np.maximum(gather - forward * constants.max_overlap, gather * (1 - constants.max_overlap))
    reduce_whole = links.data.reduce(gradient - rank.expert_weights * trained * travels, links.collective)
    if links.separate_experts:
        reduce_separate = links.expert_dp.reduce(rank.expert_weights * trained * travels, links.collective)
        reduce_whole = reduce_whole + np.where(rank.expert_weights > 0, reduce_separate, 0.0)
    reduce = np.where(zero == 0, reduce_whole, scatter)
    overlap = np.where(zero == 0, constants.overlap, constants.sharded_overlap)
    window = backward * overlap if setup.overlap_gradients else rank.none
    each_pass = np.array([exchange.reduced == "micro_batch" for exchange in EXCHANGES.values()])[zero]
    times = np.where(each_pass & (not setup.unsharded_gradients), rank.accum, 1.0)
    most = np.where(zero >= 2, constants.sharded_max_overlap, constants.max_overlap)
    exposed = times * np.maximum(reduce - window, reduce * (1 - most))
    if links.uses["hsdp"]:
        between = rank.pieces * links.groups.reduce(gradient / cols.shard_ranks / rank.pieces, links.collective)
        with_groups = reduce + np.where(cols.hsdp > 1, between, 0.0)
        every = np.array([SUMMED[False] == "micro_batch", SUMMED[True] == "micro_batch"])[(cols.pp > 1).astype(int)]
        sums = np.where(every, times, 1.0)
        exposed = (times - sums) * exposed / times + sums * np.maximum(with_groups - window, with_groups * (1 - most))
    behind = gathered_at("update", zero)
    if not setup.in_pieces:  # others collect all weights after the update
        behind = behind | gathered_at("step", zero)
    time = np.where(rank.replicas > 1, exposed + np.where(behind, gather, 0.0), 0.0)
    return time + links.straggler_wait


def _tied(rank: _Rank) -> np.ndarray:
    """Sum of the gradients of a tied embedding over the end stages, after all passes: sent to the first one and back, or by an
    all-reduce of both."""
    stage, cols = rank.stage, rank.cols
    if not rank.facts.tied or stage.first == stage.last:
        return rank.none
    copy = tied_copy(stage if stage.last else replace(stage, first=False, last=True), rank.facts, rank.tp)
    pieces = np.where((cols.zero >= 2) & rank.setup.own, cols.shard_ranks, 1.0)
    near, far, crosses = rank.links.between_stages
    return (2.0 if rank.setup.own else 1.0) * copy / pieces * rank.form.gradient / np.where(crosses, far, near)


def _parameter_gathers(rank: _Rank, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Time that the passes do not hide of the gathers of weights: before each pass of a micro-batch (ZeRO 3; backward reuses the
    weights of some blocks that are still whole), or once a step (ZeRO 2); and the time that the links are busy with them during
    one backward."""
    cols, setup, zero, most = rank.cols, rank.setup, rank.cols.zero, rank.links.constants.sharded_max_overlap
    form, stage = rank.form, rank.stage
    if not (gathered_at("pass", zero) | gathered_at("step", zero)).any():
        return rank.none, rank.none
    gathers = rank.gathers(form.gathered, rank.pieces)
    ahead = np.maximum(gathers - forward * most, gathers * (1 - most))
    inside = sum((count * rank.part_weights(part) for part, count in stage.blocks), rank.none)
    missing = gathers
    alone = cols.pp == 1
    if setup.in_pieces and alone.any():
        # It begins with the last block and the parameters outside blocks, which are whole too.
        later_blocks = np.maximum(inside - rank.part_weights(stage.blocks[-1][0]), 0.0) if stage.blocks else rank.none
        missing = rank.links.data.gather(
            later_blocks * form.gathered, rank.links.collective, np.maximum(rank.pieces - 2, 0.0)
        )
        share = np.divide(later_blocks, rank.weights, where=rank.weights > 0, out=np.zeros(len(cols)))
        missing = np.where(alone, np.where(rank.expert_weights > 0, gathers * share, missing), gathers)
    again = np.maximum(missing - backward * most, missing * (1 - most))
    time = np.where(gathered_at("pass", zero), rank.accum * (ahead + again), 0.0)
    once = gathered_at("step", zero) & setup.in_pieces
    several = rank.replicas > 1
    return np.where(once, ahead, time) * several, np.where(gathered_at("pass", zero), missing, 0.0) * several


def _update(rank: _Rank) -> np.ndarray:
    """The update on the device: every state at the memory's bandwidth, three times if operators are not fused."""
    form, bandwidth = rank.form, _bandwidth(rank.links.hardware, rank.links.constants)
    passes = np.where(rank.cols.fused_optimizer, 1.0, 3.0)
    time = np.where(rank.cols.offload == "optimizer", 0.0, passes * rank.states / bandwidth)
    if rank.setup.gradient_copy:
        # Added to the accumulator after every micro-batch.
        time = time + rank.accum * rank.trained * (2 * form.gradient + form.parameter) / bandwidth
    elif rank.setup.own or rank.facts.traced:
        # Added to the first one's gradients.
        held = np.where(rank.cols.zero >= 2, rank.owned, rank.weights) * rank.trained_share
        time = time + (rank.accum - 1) * held * 3 * form.gradient / bandwidth
    return time


def _offload(rank: _Rank) -> np.ndarray:
    """The update in host memory, as in `schedule/offloaded.py`: gradients and weights are moved once a step by pinned copies over
    the device's own link, and all ranks of a node share the rate at which it updates states."""
    hardware, constants = rank.links.hardware, rank.links.constants
    moved = rank.owned * (rank.form.gradient + rank.form.parameter)
    rate = constants.host_update_gb_per_s
    if rank.setup.deepspeed_offload:
        # Each micro-batch after the first reads the sum back and writes it again.
        moved = moved + rank.owned * 2 * rank.form.gradient * (rank.accum - 1)
        rate = constants.deepspeed_update_gb_per_s
    if rank.setup.offload_weights:
        # Weights are loaded for each pass of a micro-batch and gradients sent after each, hidden by products like other gathers.
        per_micro_batch = (
            rank.owned * (2 * rank.form.parameter + rank.form.gradient) * (1 - constants.sharded_max_overlap)
        )
        moved = np.where(rank.cols.zero >= 2, rank.accum * per_micro_batch, moved)
    ranks = np.clip(rank.tp * rank.cols.pp * rank.replicas, 1, hardware.devices_per_node)
    there = moved / (hardware.host_gb_per_s * 1e9) + rank.states * ranks / (rate * 1e9)
    return np.where(rank.cols.offload == "optimizer", there, 0.0)


def _stalls(cols: KnobArrays, hardware: Hardware, constants: Constants) -> np.ndarray:
    """Seconds that a stall of the network adds to a step, where it is likelier than not."""
    return np.where(stall_chance(cols, hardware, constants) > 0.5, stall_seconds(cols, constants), 0.0)


def stall_seconds(cols: KnobArrays, constants: Constants) -> np.ndarray:
    """Seconds that a stall of the network would add to a step, shape (n,)."""
    return (cols.grad_accum + cols.pp - 1) * 2.0 * np.minimum(cols.pp - 1, 2) * constants.stall_ms * 1e-3


def _hidden(facts: ModelFacts) -> float:
    """Elements a token of the tensor between blocks."""
    boundary = next((part.boundary for part in facts.parts if part.role == "block"), 0.0)
    return boundary / _residual(facts)


def _residual(facts: ModelFacts) -> int:
    """Bytes of an element of the tensor between blocks: fp32 under autocast."""
    return 2 if facts.precision == "bf16_pure" else 4


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
