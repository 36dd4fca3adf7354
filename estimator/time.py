"""Time of an optimizer step, term by term, for many configurations at once.

Sources: roofline, Williams et al. 2009; collectives as rings by latency and bandwidth, Thakur et al. 2005;
pipelines, Narayanan et al., arXiv:2104.04473; tensor and sequence parallelism, Korthikanti et al.,
arXiv:2205.05198.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ..knobs.layers import BlockStrategy
from ..knobs.meaning import EXCHANGES, FLOAT8, REDUCED, SUMMED, formats_of
from .collectives import Group, group
from .constants import Constants
from .experts import Rows, filled, uneven
from .facts.model_facts import Matmul, ModelFacts, Part, bytes_of
from .hardware import Hardware
from .kernels import attention_share, product_seconds, products_of
from .knob_arrays import KnobArrays
from .rank import BYTES, Formats, Rank, gathered_at, per_token, shared
from .sequences import all_to_alls, ring_waits
from .setup import TrainingSetup
from .stages import Group as StageGroup, Stage, crossings, handovers, idle_slot, staged

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
    "pipeline transfers": "links", "offload": "links", "stalls": "links", "allocator retries": "memory",
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
        one = count * np.maximum(compute, moved)
        return one, one * (2 if item.trainable else 1)
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
        one = np.maximum(one_like(filled, n, k), weights)
        back = np.maximum(one_like(filled, k, n), weights)
        if item.trainable:
            back = back + one_like(k * group, n, rows + constants.tile_rows / 2)
        return count / group * one, count / group * back
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
    """Seconds of one micro-batch in a part, forward and backward. Arrays."""

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

    @property
    def forward(self) -> np.ndarray:
        return self.matmul + self.attention + self.memory

    @property
    def backward(self) -> np.ndarray:
        return self.matmul_back + self.attention_back + self.memory_back

    def at_clocks(self, share: np.ndarray) -> "_Work":
        """A copy with products and attention at a share of their rate."""
        limited = ("matmul", "attention", "matmul_back", "attention_back", "experts", "experts_back")
        return replace(self, **{name: getattr(self, name) / share for name in limited})


def _part_work(
    part: Part,
    facts: ModelFacts,
    cols: KnobArrays,
    setup: TrainingSetup,
    hardware: Hardware,
    constants: Constants,
    distinct: tuple[np.ndarray, np.ndarray],
) -> _Work:
    tp = cols.tp.astype(float)
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq) / cols.sharers
    sequence = np.where(cols.sequence_parallel, tp, 1.0)
    width = bytes_of(facts.precision)
    zero = np.zeros(len(tp))
    matmul, back, experts, experts_back, inputs, outputs = zero, zero, zero, zero, zero, zero
    half = "fp16" if setup.products == "fp16" else "bf16" if facts.precision in FLOAT8 else facts.precision
    kind_of_product = (setup.products or facts.precision) if part.role == "block" else half
    (first, alike), fill = distinct, filled(cols)
    all_of, own = (tokens[first], tp[first]), ((tokens / cols.beside)[first], cols.slices[first].astype(float))
    for item in part.matmuls:
        one, two = (
            each[alike]
            for each in matmul_seconds(
                item,
                *(own if item.experts > 1 else all_of),
                width,
                hardware,
                kind_of_product,
                constants,
                cols.ep[first],
                fill[first],
            )
        )
        matmul, back = matmul + one, back + two
        if item.experts > 1:
            experts, experts_back = experts + one, experts_back + two
        inputs = inputs + item.count * item.rows * item.k / (tp if item.split == "row" else 1.0)
        outputs = outputs + item.count * item.rows * item.n / (tp if item.split == "column" else 1.0)
    attention = zero
    if part.attention is not None:
        kind = part.attention
        keys = min(seq, kind.window or seq)
        flops = 4.0 * tokens * keys * kind.heads * kind.head_dim / tp
        eager = part.saved.scores > 0
        if kind.causal and not eager and kind.window is None:
            flops = flops / 2
        share = constants.eager_attention_efficiency
        if not eager:
            kernel = setup.attention_kernel
            # In a ring, a kernel gets the keys of one rank at a time.
            share = constants.attention_efficiency or attention_share(hardware, kernel, keys / cols.cp, kind.head_dim)
        attention = flops / (hardware.rate(half) * share)
    bandwidth = _bandwidth(hardware, constants) / (constants.loss_traffic if part.role == "loss" else 1.0)
    memory = per_token(part.traffic, part, tp, sequence, seq) * tokens / bandwidth
    if part.traffic_backward is None:
        memory_back = 2 * memory
    else:
        memory_back = per_token(part.traffic_backward, part, tp, sequence, seq) * tokens / bandwidth
    if part.attention is not None:
        merged = (cols.cp - 1) * tokens * part.attention.heads * part.attention.head_dim / tp / bandwidth
        memory, memory_back = memory + RING_MERGE[0] * merged, memory_back + RING_MERGE[1] * merged
    if setup.products in NARROW and part.role == "block":
        cast = CAST.get(str(setup.products), 4.0) * tokens / bandwidth
        memory, memory_back = memory + cast * inputs, memory_back + cast * outputs
    chunks = np.maximum(np.ceil(tokens / part.chunk), 2.0) if part.chunk else 1.0
    return _Work(
        matmul,
        attention,
        memory,
        back,
        2.5 * attention,
        memory_back,
        zero + part.kernels * constants.launch_us * 1e-6 * chunks,
        experts,
        experts_back,
    )


def _distinct(cols: KnobArrays) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first configuration of each set of product sizes, and for each configuration its index among these."""
    sizes = ((cols.micro_batch * 4096 + cols.tp) * 4096 + cols.sharers) * 65536 + cols.ep
    for each in (cols.capacity_factor, cols.beside):
        if (each != each[0]).any():
            known, which = np.unique(each, return_inverse=True)
            sizes = sizes * len(known) + which
    _, first, alike = np.unique(sizes, return_index=True, return_inverse=True)
    return first, alike


def step_time(
    facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware, constants: Constants
) -> Mapping[str, np.ndarray]:
    """Terms of one optimizer step, ms, by their names in `TIME_TERMS`; arrays of len(cols).

    They sum to the step. `fixed` is infinite if a model has fewer blocks than stages.
    """
    size = len(cols)
    out = {name: np.zeros(size) for name in TIME_TERMS}
    out["fixed"][:] = np.inf
    # The work of a part is the same in every stage.
    distinct = _distinct(cols)
    work = {id(part): _part_work(part, facts, cols, setup, hardware, constants, distinct) for part in facts.parts}
    for split, at in cols.splits():
        pp, sub = split.pp, cols.take(at)
        cut = staged(facts, split, setup.balance, sub)
        if not cut:
            continue
        mine = {
            key: _Work(**{name: getattr(value, name)[at] for name in _Work.__slots__}) for key, value in work.items()
        }
        if split.layers is None:
            found = [_stage_time(stage, pp, facts, own, mine, setup, hardware, constants) for ((stage, own),), _ in cut]
        else:
            layers = split.layers
            # Many stages of a pipeline do the same.
            alike = {
                (stage.first, stage.last, stage.sizes, tuple(layers[at] for at in stage.indices)): (groups, stage)
                for groups, stage in cut
            }
            once = {
                key: _layered_time(groups, stage, layers, facts, sub, pp, setup, hardware, constants)
                for key, (groups, stage) in alike.items()
            }
            keys = [(s.first, s.last, s.sizes, tuple(layers[at] for at in s.indices)) for _, s in cut]
            found = [dict(once[key]) for key in keys]
        if pp > 1:
            # A stage idles while its first micro-batch passes through the other stages and the last one returns.
            idle = [terms["bubble"] / (pp - 1) for terms in found]
            counts = [len(stage.ranks) for _, stage in cut]
            whole = sum(count * each for count, each in zip(counts, idle, strict=True))
            for terms, own in zip(found, idle, strict=True):
                terms["bubble"] = whole - own
                terms["stalls"] = _stalls(terms, pp, sub, hardware, constants)
            if hardware.shares_cores:
                # While one stage waits, the others compute on its core: the total time is that of all work.
                found = [_mean(found, counts)]
        best = found[0]
        for terms in found[1:]:
            more = sum(terms.values()) > sum(best.values())
            best = {name: np.where(more, terms[name], best[name]) for name in TIME_TERMS}
        for name in TIME_TERMS:
            out[name][at] = best[name] * 1e3
    return out


def _mean(found: list[dict[str, np.ndarray]], counts: list[int]) -> dict[str, np.ndarray]:
    """The average of each term over all stages, without the bubble."""
    whole, none = sum(counts), np.zeros_like(found[0]["bubble"])
    mean = {
        name: sum((count * terms[name] for count, terms in zip(counts, found, strict=True)), none) / whole
        for name in TIME_TERMS
    }
    return {**mean, "bubble": none}


def stage_times(
    cut: list[Stage], pp: int, facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware,
    constants: Constants,
) -> list[dict[str, np.ndarray]]:  # fmt: skip
    """Terms of one optimizer step, s, for each stage as if it were the slowest; all of `cols` have `pp` stages."""
    distinct = _distinct(cols)
    work = {id(part): _part_work(part, facts, cols, setup, hardware, constants, distinct) for part in facts.parts}
    return [_stage_time(stage, pp, facts, cols, work, setup, hardware, constants) for stage in cut]


def _travels(cols: KnobArrays, form: Formats, setup: TrainingSetup, precision: str) -> np.ndarray:
    """Bytes of an element of a gradient in the exchange between replicas, shape (n,)."""
    if not setup.own:
        return np.full(len(cols), float(BYTES[setup.reduce_dtype] if setup.reduce_dtype else form.gradient))
    wide, narrow = (BYTES[formats_of({"precision": precision, "reduce_dtype": each}).reduced] for each in REDUCED)
    return np.where(cols.reduce_dtype == "bf16", float(narrow), float(wide))


def _stage_time(
    stage: Stage, pp: int, facts: ModelFacts, cols: KnobArrays, work: Mapping[int, _Work], setup: TrainingSetup,
    hardware: Hardware, constants: Constants,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Terms of one optimizer step, s, as if this stage were the slowest."""
    rank = _Rank(stage, pp, facts, cols, setup, hardware, constants)
    slot = _slot(rank, work)
    if rank.limited < 1:
        share = clocks(slot.products, slot.whole - slot.products, rank.limited)
        slot = _slot(rank, {key: value.at_clocks(share) for key, value in work.items()})
    transfer, bubble = _pipeline(rank, slot)
    gathers, gathered = _parameter_gathers(rank, slot.forward, slot.backward)
    exchanged = _data_parallel(rank, slot.forward, np.maximum(slot.backward - gathered, 0.0))
    terms = _terms(rank, slot, gathers, exchanged, transfer, bubble)
    terms["stalls"] = _stalls(terms, pp, cols, hardware, constants)
    return terms


def _terms(
    rank: "_Rank", slot: "_Slot", gathers: np.ndarray, exchanged: np.ndarray, transfer: np.ndarray, bubble: np.ndarray
) -> dict[str, np.ndarray]:
    """The terms of a stage's step by their names, without stalls."""
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
        "data parallel": exchanged,
        "parameter gathers": gathers,
        "pipeline transfers": transfer,
        "bubble": bubble,
        "optimizer": _update(rank),
        "offload": _offload(rank),
        "stalls": none,
        "allocator retries": none,
        "fixed": none + rank.constants.step_ms * 1e-3,
    }


def _layered_time(
    groups: Sequence[StageGroup], stage: Stage, layers: Sequence[BlockStrategy], facts: ModelFacts, cols: KnobArrays, pp: int,
    setup: TrainingSetup, hardware: Hardware, constants: Constants,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Terms of one optimizer step, s, of a stage with groups of blocks that have different strategies.

    Work adds up. Communication overlaps with the work of all groups, in proportion to each group's share. If samples are
    distributed among ranks and gathered again, there is an all-gather in each direction (`schedule/parallel/sharing.py`).
    """
    ranks = [_Rank(group, pp, facts, own, setup, hardware, constants) for group, own in groups]
    works = []
    for rank in ranks:
        distinct = _distinct(rank.cols)
        held = [*(part for part, _ in rank.stage.blocks), *rank.stage.ends]
        works.append(
            {id(part): _part_work(part, facts, rank.cols, setup, hardware, constants, distinct) for part in held}
        )
    whole = _Rank(stage, pp, facts, cols, setup, hardware, constants)
    slot = _joined([_slot(rank, work) for rank, work in zip(ranks, works, strict=True)], whole.none)
    if whole.limited < 1:
        share = clocks(slot.products, slot.whole - slot.products, whole.limited)
        slowed = [{key: value.at_clocks(share) for key, value in work.items()} for work in works]
        slot = _joined([_slot(rank, work) for rank, work in zip(ranks, slowed, strict=True)], whole.none)
    for degree, times in handovers(stage, layers, int(cols.tp[0])).items():
        among = group(cols.tp // degree, np.full(len(cols), degree), whole.devices, hardware, constants)
        moved = whole.tokens * _hidden(facts) * _residual(facts)
        once = times * among.gather(moved, whole.collective)
        slot.tensor, slot.forward, slot.backward = slot.tensor + 2 * once, slot.forward + once, slot.backward + once
    gathers, gathered = _hidden_behind(
        [partial(_parameter_gathers, rank) for rank in ranks], slot.forward, slot.backward, whole.none
    )
    left = np.maximum(slot.backward - gathered, 0.0)
    late = _late(whole)

    def exchange(rank: _Rank) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return lambda forward, backward: (_data_parallel(rank, forward, backward) - late, whole.none)

    exchanged, _ = _hidden_behind([exchange(rank) for rank in ranks], slot.forward, left, whole.none)
    transfer, bubble = _pipeline(whole, slot)
    terms = _terms(whole, slot, gathers, exchanged + late, transfer, bubble)
    terms["optimizer"] = sum((_update(rank) for rank in ranks), whole.none)
    terms["offload"] = sum((_offload(rank) for rank in ranks), whole.none)
    terms["stalls"] = _stalls(terms, pp, cols, hardware, constants)
    return terms


def _joined(slots: "Sequence[_Slot]", none: np.ndarray) -> "_Slot":
    """The sums of a micro-batch's seconds over groups of blocks."""
    return _Slot(**{name: sum((getattr(each, name) for each in slots), none) for name in _Slot.__slots__})


def _hidden_behind(
    found: Sequence[Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]],
    forward: np.ndarray,
    backward: np.ndarray,
    none: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over groups of their exchanges behind the passes: each of `found`, called with the seconds of both passes, returns the
    exposed time of its exchange and its total time. Each group overlaps with its share of the passes."""
    bare = [each(none, none)[0] for each in found]
    total = sum(bare, none)
    shares = [np.divide(each, total, where=total > 0, out=np.zeros_like(none)) for each in bare]
    shown = [each(forward * share, backward * share) for each, share in zip(found, shares)]
    return sum((each for each, _ in shown), none), sum((busy for _, busy in shown), none)


@dataclass(frozen=True)
class _Rank(Rank):
    """A rank on its hardware."""

    hardware: Hardware
    constants: Constants

    @cached_property
    def devices(self) -> np.ndarray:
        """Devices of the training."""
        return self.tp * self.replicas * self.pp

    @cached_property
    def switch(self) -> float:
        """Seconds that ranks on one core wait for each other at a collective or a hop."""
        return self.constants.switch_us * 1e-6 if self.hardware.shares_cores else 0.0

    @cached_property
    def collective(self) -> float:
        """Seconds of a collective beyond those of its bytes and its ring."""
        return self.constants.collective_us * 1e-6 + self.switch

    @cached_property
    def heads(self) -> Group:
        """Ranks that exchange heads."""
        return group(self.cols.sp, self.cols.tp, self.devices, self.hardware, self.constants)

    @cached_property
    def ring(self) -> Group:
        """Ranks that pass keys and values around a ring."""
        return group(self.cols.cp, self.cols.tp * self.cols.sp, self.devices, self.hardware, self.constants)

    @cached_property
    def data(self) -> Group:
        """Replicas that share pieces. They are adjacent; HSDP has several such groups."""
        return group(self.cols.shares, self.cols.tp, self.devices, self.hardware, self.constants)

    @cached_property
    def experts(self) -> Rows:
        """Ranks that share experts."""
        ranks = group(self.cols.ep, self.cols.slices, self.devices, self.hardware, self.constants)
        return Rows.of(ranks, self.cols.slices, self.hardware, self.constants)

    @cached_property
    def copies(self) -> Group:
        """Ranks with the same experts."""
        return group(self.cols.copies, self.cols.slices * self.cols.ep, self.devices, self.hardware, self.constants)

    def gathers(self, width: "np.ndarray | float", pieces: "np.ndarray | float" = 1.0) -> np.ndarray:
        """Seconds of all-gathers of the rank's weights at `width` bytes, or of reduce-scatters; experts that others share are
        gathered among the replicas with the same ones."""
        together = self.data.gather((self.weights - self.apart) * width, self.collective, pieces)
        own = self.copies.gather(self.apart * width, self.collective, pieces)
        return together + np.where(self.apart > 0, own, 0.0)

    @cached_property
    def tensor_pair(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a pair of tensor parallelism's collectives, and those of the host to start it.

        Two all-reduces a block in each pass, or as many pairs of all-gather and reduce-scatter (of the same bytes) under sequence
        parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
        """
        tensor = group(self.cols.tp, np.ones(len(self.tp), int), self.devices, self.hardware, self.constants)
        moved = self.tokens * _hidden(self.facts) * bytes_of(self.facts.precision)
        pair = np.where(
            self.cols.sequence_parallel,
            2 * tensor.gather(moved, self.collective),
            tensor.reduce(moved, self.collective),
        )
        start = np.where(self.tp > 1, 2 * self.constants.launch_us * 1e-6, 0.0)
        if self.pp > 1:
            crossing = self.devices > self.hardware.devices_per_node
            step = self.constants.ring_step_with_pipeline_us
            start = start + np.where(crossing, 2 * (self.tp - 1) * step * 1e-6, 0.0)
        if self.setup.overlap_tensor:
            pair = pair * (1 - self.constants.overlap_tensor)
        return pair, start

    @cached_property
    def links(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each part of the stage, by its id: seconds of an exchange of heads and of one of experts' rows, and the excess of
        the fullest expert's rows over the mean."""
        width, found = bytes_of(self.facts.precision), {}
        for part in (*(part for part, _ in self.stage.blocks), *self.stage.ends):
            heads = all_to_alls(self, part, self.heads, self.collective)
            sent = self.tokens * part.routed * width * filled(self.cols) / self.cols.beside
            rows = 2 * self.experts.seconds(sent, self.collective, self.cols.capacity_factor > 0)
            found[id(part)] = heads, rows, uneven(part, self.cols, self.constants) - 1
        return found

    @cached_property
    def limited(self) -> float:
        """Share of the rate of products that is left if a device runs nothing else."""
        rate = self.constants.limited_rate
        return products_of(self.hardware).sustained if rate is None else rate

    @cached_property
    def pieces(self) -> float:
        """Number of pieces: gradients and weights are sent block by block, with the parameters outside blocks as one more."""
        return 1.0 + sum(count for _, count in self.stage.blocks)

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
    def whole(self) -> np.ndarray:
        links = self.tensor + self.exchange + self.rows + self.uneven
        return self.matmul + self.attention + self.memory + self.again + self.launches + links


def clocks(products: np.ndarray, other: np.ndarray, limited: float) -> np.ndarray:
    """Share of the rate of products under a power limit: `limited` if a device runs only products, close to 1 if it runs few of
    them.

    Clocks follow the power averaged over about ten milliseconds, so they fall in proportion to the share of time that products
    take at the resulting clocks: f = 1 - (1 - limited) * (products / f) / (products / f + other).
    """
    gap = other - products
    root = np.sqrt(gap**2 + 4 * other * products * limited)
    idle, busy = np.maximum(2 * other, 1e-30), np.maximum(root - gap, 1e-30)
    # Two forms of the same root of a quadratic, each used where it is free of cancellation.
    return np.where(gap > 0, (gap + root) / idle, 2 * limited * products / busy)


def _slot(rank: _Rank, work: Mapping[int, _Work]) -> _Slot:
    """One micro-batch: device and links run one after the other, and take at least as long as the host's launches.

    Under sequence parallelism, backward gathers the inputs of products again.
    """
    pair, start = rank.tensor_pair
    anew = np.where(rank.cols.sequence_parallel, 1.0, 0.0)
    out = _Slot(**dict.fromkeys(_Slot.__slots__, rank.none))
    for part, count in (*rank.stage.blocks, *((each, each.count) for each in rank.stage.ends)):
        item = work[id(part)]
        block = part.role == "block"
        ratio = rank.cols.checkpoint_ratio if block else rank.none
        pairs = rank.none + (2.0 if block else 1.0 if part.role in ("embedding", "head") else 0.0)
        if part.experts:
            # Ranks that divide tokens among whole experts gather outputs, or nothing with sequence parallelism.
            pairs = np.where(rank.cols.beside > 1, np.where(rank.cols.sequence_parallel, 1.0, 1.5), pairs)
        ahead, (exchange, rows, late) = pairs * pair, rank.links[id(part)]
        around, around_back = ring_waits(rank, part, rank.ring, rank.collective, item.attention, item.attention_back)
        there = exchange + around + rows + late * item.experts
        home = exchange + around_back + rows + late * item.experts_back
        back = ahead * (1 + anew / 2)
        rebuilt, of_products = ratio * item.forward, ratio * (item.matmul + item.attention)
        if block and rank.setup.keeps_products:
            rebuilt = rebuilt + (1 - ratio) * (item.matmul / 2 + item.memory)
            of_products = of_products + (1 - ratio) * item.matmul / 2
        out.matmul = out.matmul + count * (item.matmul + item.matmul_back)
        out.attention = out.attention + count * (item.attention + item.attention_back)
        out.memory = out.memory + count * (item.memory + item.memory_back)
        computed = item.matmul + item.matmul_back + item.attention + item.attention_back
        out.products = out.products + count * (computed + of_products)
        out.again = out.again + count * rebuilt
        out.tensor = out.tensor + count * (ahead + back + ratio * ahead)
        out.exchange = out.exchange + count * ((1 + ratio) * (exchange + around) + exchange + around_back)
        out.rows = out.rows + count * (2 + ratio) * rows
        out.uneven = out.uneven + count * late * ((1 + ratio) * item.experts + item.experts_back)
        host = item.host + pairs * start
        again = 1.0 if block and rank.setup.keeps_products else ratio
        host_back = (2 + again) * item.host + pairs * (1 + anew / 2 + ratio) * start
        links = back + ratio * ahead + ratio * there + home
        slack = np.maximum(host - item.forward - ahead - there, 0.0)
        slack_back = np.maximum(host_back - item.backward - rebuilt - links, 0.0)
        out.launches = out.launches + count * (slack + slack_back)
        out.of_weights = out.of_weights + count * (item.matmul_back - item.matmul)
        out.forward = out.forward + count * (item.forward + ahead + there + slack)
        out.backward = out.backward + count * (item.backward + rebuilt + links + slack_back)
    return out


def _pipeline(rank: _Rank, slot: _Slot) -> tuple[np.ndarray, np.ndarray]:
    """Transfers between stages, m crossings of each boundary in each direction, and the bubble (`idle_slot`)."""
    if rank.pp == 1:
        return rank.none, rank.none
    hardware, constants, cols = rank.hardware, rank.constants, rank.cols
    far = rank.tp * rank.replicas >= hardware.devices_per_node
    rate = np.where(
        far,
        hardware.inter_node.gb_per_s * constants.network_efficiency,
        hardware.intra_node.gb_per_s * constants.link_efficiency,
    )
    sequence = np.where(cols.sequence_parallel | rank.setup.scatter_transfers, rank.tp, 1.0)
    moved = rank.tokens * _hidden(rank.facts) * _residual(rank.facts) / sequence
    hop = moved / (rate * 1e9) + constants.hop_ms * 1e-3 + rank.switch
    shown = 1 - constants.max_overlap if rank.setup.overlap_transfers else 1.0
    transfer = shown * rank.accum * 2.0 * crossings(rank.pp, cols) * hop
    idle = idle_slot(slot.whole, slot.forward, slot.backward, slot.of_weights, hop, cols)
    return transfer, (rank.pp - 1) * idle


def _data_parallel(rank: _Rank, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Time that backward does not hide of the gradients' reduction, the gather of weights after the update, and the wait of all
    ranks for the slowest.

    Gradients are reduced by an all-reduce if replicas are whole, otherwise by a reduce-scatter, block by block from ZeRO 2 on
    (Rajbhandari et al., arXiv:1910.02054, section 7). HSDP also sums pieces over the groups, with every micro-batch or the last.
    """
    cols, setup, constants, zero = rank.cols, rank.setup, rank.constants, rank.cols.zero
    share, form = cols.shares, rank.form
    groups = group(cols.hsdp, cols.tp * share, rank.devices, rank.hardware, constants)
    travels, trained = _travels(cols, form, setup, rank.facts.precision), rank.trained_share
    gradient = rank.trained * travels
    scatter = rank.gathers(travels, np.where(zero >= 2, rank.pieces, 1.0)) * trained
    gather = rank.gathers(form.parameter) * trained
    if setup.overlap_gathers:
        gather = np.maximum(gather - forward * constants.max_overlap, gather * (1 - constants.max_overlap))
    whole = rank.data.reduce(gradient - rank.apart * trained * travels, rank.collective)
    whole = whole + np.where(rank.apart > 0, rank.copies.reduce(rank.apart * trained * travels, rank.collective), 0.0)
    reduce = np.where(zero == 0, whole, scatter)
    overlap = np.where(zero == 0, constants.overlap, constants.sharded_overlap)
    window = backward * overlap if setup.overlap_gradients else rank.none
    each_pass = np.array([each.reduced == "micro_batch" for each in EXCHANGES.values()])[zero]
    times = np.where(each_pass & (not setup.unsharded_gradients), rank.accum, 1.0)
    between = rank.pieces * groups.reduce(gradient / share / rank.pieces, rank.collective)
    summed = np.where(cols.hsdp > 1, between, 0.0)
    most = np.where(zero >= 2, constants.sharded_max_overlap, constants.max_overlap)
    alone, both = (np.maximum(each - window, each * (1 - most)) for each in (reduce, reduce + summed))
    sums = 1.0 if SUMMED[rank.pp > 1] == "step" else times
    exposed = (times - sums) * alone + sums * both
    behind = gathered_at("update", zero)
    if not setup.in_pieces:  # others collect all weights after the update
        behind = behind | gathered_at("step", zero)
    time = np.where(rank.replicas > 1, exposed + np.where(behind, gather, 0.0), 0.0)
    return time + _late(rank)


def _late(rank: _Rank) -> np.ndarray:
    """The wait of all ranks for the slowest of them."""
    nodes = np.maximum(rank.devices / rank.hardware.devices_per_node, 1.0)
    return np.where(rank.devices > 1, rank.constants.straggler_ms * 1e-3 * np.log2(nodes), 0.0)


def _parameter_gathers(rank: _Rank, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Time that the passes do not hide of the gathers of weights: before each pass of a micro-batch (ZeRO 3; backward reuses the
    weights of some blocks that are still whole), or once a step (ZeRO 2); and the time that the links are busy with them during
    one backward."""
    cols, setup, zero, most = rank.cols, rank.setup, rank.cols.zero, rank.constants.sharded_max_overlap
    form, stage = rank.form, rank.stage
    gathers = rank.gathers(form.gathered, rank.pieces)
    ahead = np.maximum(gathers - forward * most, gathers * (1 - most))
    inside = sum((count * rank.whole(each) for each, count in stage.blocks), rank.none)
    missing = gathers
    if setup.in_pieces and rank.pp == 1:
        # It begins with the last block and the parameters outside blocks, which are whole too.
        left = np.maximum(inside - rank.whole(stage.blocks[-1][0]), 0.0) if stage.blocks else rank.none
        missing = rank.data.gather(left * form.gathered, rank.collective, max(rank.pieces - 2, 0.0))
        share = np.divide(left, rank.weights, where=rank.weights > 0, out=np.zeros(len(cols)))
        missing = np.where(rank.apart > 0, gathers * share, missing)
    again = np.maximum(missing - backward * most, missing * (1 - most))
    time = np.where(gathered_at("pass", zero), rank.accum * (ahead + again), 0.0)
    once = gathered_at("step", zero) & setup.in_pieces
    several = rank.replicas > 1
    return np.where(once, ahead, time) * several, np.where(gathered_at("pass", zero), missing, 0.0) * several


def _update(rank: _Rank) -> np.ndarray:
    """The update on the device: every state at the memory's bandwidth, three times if operators are not fused."""
    form, bandwidth = rank.form, _bandwidth(rank.hardware, rank.constants)
    passes = np.where(rank.cols.fused_optimizer, 1.0, 3.0)
    time = np.where(rank.cols.offload == "optimizer", 0.0, passes * rank.states / bandwidth)
    if rank.setup.gradient_copy:
        # Added to the accumulator after every micro-batch.
        time = time + rank.accum * rank.weights * (2 * form.gradient + form.parameter) / bandwidth
    return time


def _offload(rank: _Rank) -> np.ndarray:
    """The update in host memory, as in `schedule/offloaded.py`: gradients and weights are moved by pinned copies, states at the
    rate of the rank's share of the cores."""
    moved = rank.owned * (rank.form.gradient + rank.form.parameter)
    if rank.setup.offload_weights:
        # Weights are loaded for each pass of a micro-batch and gradients sent after each, hidden by products like other gathers.
        each = rank.owned * (2 * rank.form.parameter + rank.form.gradient) * (1 - rank.constants.sharded_max_overlap)
        moved = np.where(rank.cols.zero >= 2, rank.accum * each, moved)
    there = moved / (rank.hardware.host_gb_per_s * 1e9) + rank.states / (rank.constants.host_update_gb_per_s * 1e9)
    return np.where(rank.cols.offload == "optimizer", there, 0.0)


def _stalls(
    terms: Mapping[str, np.ndarray], pp: int, cols: KnobArrays, hardware: Hardware, constants: Constants
) -> np.ndarray:
    """Seconds to add so that the step has the expected logarithm of its time, given the chance of a stall."""
    total = sum(value for name, value in terms.items() if name != "stalls")
    hops = (cols.grad_accum + pp - 1) * 2.0 * min(pp - 1, 2)
    chance = stall_chance(cols, hardware, constants)
    return total * np.expm1(chance * np.log1p(hops * constants.stall_ms * 1e-3 / total))


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
