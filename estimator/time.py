"""Time of an optimizer step, term by term, for many configurations at once.

Sources: roofline, Williams et al. 2009; collectives as rings by latency and bandwidth, Thakur et al. 2005;
pipelines, Narayanan et al., arXiv:2104.04473; tensor and sequence parallelism, Korthikanti et al.,
arXiv:2205.05198.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..results.meaning import EXCHANGES, REDUCED, SUMMED, formats_of
from .columns import Columns
from .constants import Constants
from .hardware import Hardware
from .memory import BYTES, Formats, cut, formats, gathered_at, local_parameters, per_token
from .model_facts import Matmul, ModelFacts, Part
from .setup import TrainingSetup
from .stages import Stage, staged

TIME_TERMS = (
    "matmul", "attention", "memory-bound", "recomputation", "launches", "tensor parallel", "data parallel",
    "parameter gathers", "pipeline transfers", "bubble", "optimizer", "offload", "stalls",
    "allocator retries", "fixed",
)  # fmt: skip
"""Names of the terms, in the order of the breakdown."""
BINDS = {
    "matmul": "compute", "attention": "compute", "recomputation": "compute",
    "memory-bound": "memory bandwidth", "optimizer": "memory bandwidth", "launches": "launches",
    "fixed": "launches", "tensor parallel": "links", "data parallel": "links", "parameter gathers": "links",
    "pipeline transfers": "links", "offload": "links", "stalls": "links", "allocator retries": "memory",
    "bubble": "bubble",
}  # fmt: skip
"""What a term means when it is the largest kind."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: how many, and over what. Arrays of n."""

    size: np.ndarray
    bandwidth: np.ndarray
    """Bytes/s of one rank in a ring."""
    latency: np.ndarray
    """Seconds that an empty message takes once around the ring: no step of it ends before its slowest
    link's."""
    tree: np.ndarray
    """Seconds that an empty all-reduce takes up and down a tree of nodes."""
    crosses: np.ndarray
    """Whether the ring leaves the node."""

    def gather(self, total: np.ndarray, fixed: float, pieces: "np.ndarray | float" = 1.0) -> np.ndarray:
        """Seconds of all-gathers to `total` bytes on each rank, or of reduce-scatters of them, in so many
        pieces."""
        steps = self.size - 1
        return np.where(
            self.size > 1, pieces * (fixed + self.latency) + total * steps / self.size / self.bandwidth, 0.0
        )

    def reduce(self, total: np.ndarray, fixed: float) -> np.ndarray:
        """Seconds of an all-reduce of `total` bytes: as a ring twice around, or as a tree where that is
        nearer."""
        moved = 2 * total * (self.size - 1) / self.size / self.bandwidth
        latency = np.minimum(2 * self.latency, self.tree)
        return np.where(self.size > 1, fixed + latency + moved, 0.0)


def group(
    size: np.ndarray, stride: np.ndarray, devices: np.ndarray, hardware: Hardware, constants: Constants
) -> Group:
    """Ranks `stride` apart, `size` of them, nodes filled in the order of ranks.

    A ring that leaves its node uses the network share of each of its members there, and every one of its
    steps waits for the network (Thakur et al. 2005: the latency of a step is that of the slowest link).
    All-reduces can go by NCCL's double binary trees instead, whose depth is logarithmic (Sanders et al.
    2009).
    """
    per_node = hardware.devices_per_node
    crosses = size * stride > per_node
    local = np.clip(per_node // np.maximum(stride, 1), 1, size)
    nodes = np.maximum(devices / per_node, 1.0)
    inside = hardware.intra_node.gb_per_s * 1e9 * constants.link_efficiency
    near = hardware.intra_node.latency_us / 4 * 1e-6
    far = hardware.inter_node.latency_us * 1e-6
    depth = np.where(crosses, np.ceil(np.log2(np.maximum(np.ceil(size / local), 1))), 0)
    share = np.minimum(local, constants.network_rails)
    outside = hardware.inter_node.gb_per_s * 1e9 * constants.network_efficiency * share
    outside = np.minimum(outside / (1 + constants.scale_loss * np.log2(nodes)), inside)
    return Group(
        size=size.astype(float),
        bandwidth=np.where(crosses, outside, inside),
        latency=(size - 1) * np.where(crosses, far, near),
        tree=2 * (depth * far + (local - 1) * near),
        crosses=crosses,
    )


def matmul_seconds(
    item: Matmul, tokens: np.ndarray, tp: np.ndarray, width: float, hardware: Hardware, precision: str,
    constants: Constants,
) -> np.ndarray:  # fmt: skip
    """One forward product on one rank: the larger of its arithmetic and its memory traffic."""
    rows = np.maximum(tokens * item.rows, 1.0)
    k = item.k / (tp if item.split == "row" else 1.0)
    n = item.n / (tp if item.split == "column" else 1.0)
    shape = (1 + constants.half_rows / rows) * (1 + constants.half_width / k) * (1 + constants.half_width / n)
    rate = hardware.rate(precision) * hardware.achievable * constants.matmul_efficiency
    compute = 2 * rows * k * n / rate * shape
    moved = width * (rows * k + k * n + rows * n) / _bandwidth(hardware, constants)
    return item.count * np.maximum(compute, moved)


def _bandwidth(hardware: Hardware, constants: Constants) -> float:
    return hardware.memory_gb_per_s * 1e9 * constants.bandwidth_efficiency


@dataclass(slots=True)
class _Work:
    """Seconds of one micro-batch in a part: forward and backward. Arrays."""

    matmul: np.ndarray
    attention: np.ndarray
    memory: np.ndarray
    matmul_back: np.ndarray
    attention_back: np.ndarray
    memory_back: np.ndarray
    host: np.ndarray
    """The host's time for the forward's launches."""

    @property
    def forward(self) -> np.ndarray:
        return self.matmul + self.attention + self.memory

    @property
    def backward(self) -> np.ndarray:
        return self.matmul_back + self.attention_back + self.memory_back


def _part_work(
    part: Part,
    facts: ModelFacts,
    cols: Columns,
    setup: TrainingSetup,
    hardware: Hardware,
    constants: Constants,
) -> _Work:
    tp = cols.tp.astype(float)
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq)
    sequence = np.where(cols.sequence_parallel, tp, 1.0)
    width = 4 if facts.precision == "fp32" else 2
    zero = np.zeros(len(tp))
    matmul, back = zero, zero
    for item in part.matmuls:
        one = matmul_seconds(item, tokens, tp, width, hardware, facts.precision, constants)
        matmul = matmul + one
        back = back + one * (2 if item.trainable else 1)
    attention = zero
    if part.attention is not None:
        kind = part.attention
        keys = min(seq, kind.window or seq)
        flops = 4.0 * tokens * keys * kind.heads * kind.head_dim / tp
        eager = part.saved.scores > 0
        if kind.causal and not eager and kind.window is None:
            flops = flops / 2
        share = constants.eager_attention_efficiency if eager else constants.attention_efficiency
        rate = hardware.rate(facts.precision) * share
        attention = flops / rate
    bandwidth = _bandwidth(hardware, constants) / (constants.loss_traffic if part.role == "loss" else 1.0)
    memory = per_token(part.traffic, part, tp, sequence, seq) * tokens / bandwidth
    if part.traffic_backward is None:
        memory_back = 2 * memory
    else:
        memory_back = per_token(part.traffic_backward, part, tp, sequence, seq) * tokens / bandwidth
    chunks = np.maximum(np.ceil(tokens / part.chunk), 2.0) if part.chunk else 1.0
    return _Work(
        matmul,
        attention,
        memory,
        back,
        2.5 * attention,
        memory_back,
        zero + part.kernels * constants.launch_us * 1e-6 * chunks,
    )


def step_time(
    facts: ModelFacts, cols: Columns, setup: TrainingSetup, hardware: Hardware, constants: Constants
) -> Mapping[str, np.ndarray]:
    """Terms of one optimizer step, ms, by their names in `TIME_TERMS`; arrays of len(cols).

    They sum to the step. infinity in `fixed` where a model has fewer blocks than stages.
    """
    size = len(cols)
    out = {name: np.zeros(size) for name in TIME_TERMS}
    out["fixed"][:] = np.inf
    # A part's work is the same in every stage.
    work = {id(part): _part_work(part, facts, cols, setup, hardware, constants) for part in facts.parts}
    for split, at in cols.splits():
        pp, sub = split.pp, cols.take(at)
        cut = staged(facts, split, setup.balance, sub)
        if not cut:
            continue
        mine = {
            key: _Work(**{name: getattr(value, name)[at] for name in _Work.__slots__})
            for key, value in work.items()
        }
        found = [_stage_time(stage, pp, facts, own, mine, setup, hardware, constants) for stage, own in cut]
        if pp > 1:
            # A stage idles while its first micro-batch passes through the others and the last one comes back.
            idle = [terms["bubble"] / (pp - 1) for terms in found]
            counts = [len(stage.ranks) for stage, _ in cut]
            whole = sum(count * each for count, each in zip(counts, idle, strict=True))
            for terms, own in zip(found, idle, strict=True):
                terms["bubble"] = whole - own
                terms["stalls"] = _stalls(terms, pp, sub, hardware, constants)
            if hardware.shares_cores:
                # While one stage waits the others compute on its core: together they take what they have to
                # do.
                found = [_mean(found, counts)]
        best = found[0]
        for terms in found[1:]:
            more = sum(terms.values()) > sum(best.values())
            best = {name: np.where(more, terms[name], best[name]) for name in TIME_TERMS}
        for name in TIME_TERMS:
            out[name][at] = best[name] * 1e3
    return out


def _mean(found: list[dict[str, np.ndarray]], counts: list[int]) -> dict[str, np.ndarray]:
    """The terms of a stage as they are on average over all stages, without the bubble."""
    whole = sum(counts)
    mean = {
        name: sum(count * terms[name] for count, terms in zip(counts, found, strict=True)) / whole
        for name in TIME_TERMS
    }
    return {**mean, "bubble": np.zeros_like(mean["bubble"])}


def stage_times(
    cut: list[Stage], pp: int, facts: ModelFacts, cols: Columns, setup: TrainingSetup, hardware: Hardware,
    constants: Constants,
) -> list[dict[str, np.ndarray]]:  # fmt: skip
    """Terms of one optimizer step, s, as each stage by itself would set them; all of `cols` have `pp`
    stages."""
    work = {id(part): _part_work(part, facts, cols, setup, hardware, constants) for part in facts.parts}
    return [_stage_time(stage, pp, facts, cols, work, setup, hardware, constants) for stage in cut]


def _travels(cols: Columns, form: Formats, setup: TrainingSetup, precision: str) -> np.ndarray:
    """Bytes of an element of a gradient on its way between replicas, shape (n,)."""
    if not setup.own:
        return np.full(len(cols), float(BYTES[setup.reduce_dtype] if setup.reduce_dtype else form.gradient))
    wide, narrow = (
        BYTES[formats_of({"precision": precision, "reduce_dtype": each}).reduced] for each in REDUCED
    )
    return np.where(cols.reduce_dtype == "bf16", float(narrow), float(wide))


def _stage_time(
    stage: Stage, pp: int, facts: ModelFacts, cols: Columns, work: Mapping[int, _Work], setup: TrainingSetup,
    hardware: Hardware, constants: Constants,
) -> dict[str, np.ndarray]:  # fmt: skip
    tp, dp, zero = cols.tp.astype(float), cols.dp.astype(float), cols.zero
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq)
    accum = cols.grad_accum.astype(float)
    none = np.zeros(len(tp))
    devices = tp * dp * pp
    tensor = group(cols.tp, np.ones(len(tp), int), devices, hardware, constants)
    # Replicas that share pieces are neighbours; with HSDP there are several such groups.
    share = cols.shares
    data = group(share, cols.tp, devices, hardware, constants)
    groups = group(cols.hsdp, cols.tp * share, devices, hardware, constants)
    weights = local_parameters(stage, facts, tp)
    form = formats(setup, facts.precision)

    # Tensor parallel: two all-reduces a block each way, or as many pairs of all-gather and reduce-scatter (of
    # the same bytes) under sequence parallelism, where backward gathers the inputs of products anew.
    hidden = _hidden(facts)
    width = 4 if facts.precision == "fp32" else 2
    switch = constants.switch_us * 1e-6 if hardware.shares_cores else 0.0
    moved, fixed_cost = tokens * hidden * width, constants.collective_us * 1e-6 + switch
    pair = np.where(
        cols.sequence_parallel, 2 * tensor.gather(moved, fixed_cost), tensor.reduce(moved, fixed_cost)
    )
    # What the host takes to start a pair of collectives.
    start = np.where(tp > 1, 2 * constants.launch_us * 1e-6, 0.0)
    if pp > 1:
        crossing = devices > hardware.devices_per_node
        start = start + np.where(crossing, 2 * (tp - 1) * constants.ring_step_with_pipeline_us * 1e-6, 0.0)
    anew = np.where(cols.sequence_parallel, 1.0, 0.0)

    # One micro-batch: device and links work one after the other, and at least as long as the host launches.
    matmul, attention, memory, again, launches, tensor_time = none, none, none, none, none, none
    forward, backward, of_weights = none, none, none
    for part, count in (*stage.blocks, *((each, each.count) for each in stage.ends)):
        item = work[id(part)]
        block = part.role == "block"
        ratio = cols.checkpoint_ratio if block else none
        pairs = 2.0 if block else 1.0 if part.role in ("embedding", "head") else 0.0
        ahead = pairs * pair
        back = ahead * (1 + anew / 2)
        rebuilt = ratio * item.forward
        matmul = matmul + count * (item.matmul + item.matmul_back)
        attention = attention + count * (item.attention + item.attention_back)
        memory = memory + count * (item.memory + item.memory_back)
        again = again + count * rebuilt
        tensor_time = tensor_time + count * (ahead + back + ratio * ahead)
        host = item.host + pairs * start
        host_back = (2 + ratio) * item.host + pairs * (1 + anew / 2 + ratio) * start
        slack = np.maximum(host - item.forward - ahead, 0.0)
        slack_back = np.maximum(host_back - item.backward - rebuilt - back - ratio * ahead, 0.0)
        launches = launches + count * (slack + slack_back)
        of_weights = of_weights + count * (item.matmul_back - item.matmul)
        forward = forward + count * (item.forward + ahead + slack)
        backward = backward + count * (item.backward + rebuilt + back + ratio * ahead + slack_back)
    slot = matmul + attention + memory + again + launches + tensor_time

    # Pipeline.
    transfer, bubble = none, none
    if pp > 1:
        far = tp * dp >= hardware.devices_per_node
        rate = np.where(
            far,
            hardware.inter_node.gb_per_s * constants.network_efficiency,
            hardware.intra_node.gb_per_s * constants.link_efficiency,
        )
        sequence = np.where(cols.sequence_parallel | setup.scatter_transfers, tp, 1.0)
        hop = tokens * hidden * _residual(facts) / sequence / (rate * 1e9) + constants.hop_ms * 1e-3 + switch
        transfer = accum * 2.0 * crossings(pp, cols) * hop
        bubble = (pp - 1) * idle_slot(slot, forward, backward, of_weights, hop, cols)

    # Data parallel.
    gradient = weights * _travels(cols, form, setup, facts.precision)
    weight = weights * form.gathered
    # Shards of gradients and weights go block by block, and what is in no block by itself.
    pieces = 1.0 + sum(count for _, count in stage.blocks)
    scatter = data.gather(gradient, fixed_cost, np.where(zero >= 2, pieces, 1.0))
    gather = data.gather(weights * form.parameter, fixed_cost)
    reduce = np.where(zero == 0, data.reduce(gradient, fixed_cost), scatter)
    overlap = np.where(zero == 0, constants.overlap, constants.sharded_overlap)
    window = backward * overlap if setup.overlap_gradients else none
    each_pass = np.array([each.reduced == "micro_batch" for each in EXCHANGES.values()])[zero]
    times = np.where(each_pass, accum, 1.0)
    # With HSDP pieces are summed over the groups besides, with every micro-batch or the last.
    summed = np.where(cols.hsdp > 1, pieces * groups.reduce(gradient / share / pieces, fixed_cost), 0.0)
    alone, both = (
        np.maximum(each - window, each * (1 - constants.max_overlap)) for each in (reduce, reduce + summed)
    )
    sums = 1.0 if SUMMED[pp > 1] == "step" else times
    exposed = (times - sums) * alone + sums * both
    behind = gathered_at("update", zero)
    ahead_of_step = gathered_at("step", zero)
    if not setup.own:  # others collect all weights once they are updated
        behind, ahead_of_step = behind | ahead_of_step, ahead_of_step & False
    data_time = np.where(dp > 1, exposed + np.where(behind, gather, 0.0), 0.0)
    nodes = np.maximum(devices / hardware.devices_per_node, 1.0)
    # Ranks wait for the slowest of them.
    data_time = data_time + np.where(devices > 1, constants.straggler_ms * 1e-3 * np.log2(nodes), 0.0)
    gathers = data.gather(weight, fixed_cost, pieces)
    gather_forward = np.maximum(
        gathers - forward * constants.max_overlap, gathers * (1 - constants.max_overlap)
    )
    # Backward finds the weights of some blocks still whole.
    inside = sum(
        (count * (each.parameters - each.sharded + each.sharded / tp) for each, count in stage.blocks), none
    )
    missing = gathers * (
        1 - cols.gathered_ratio * np.divide(inside, weights, where=weights > 0, out=np.zeros(len(tp)))
    )
    if setup.own and pp == 1 and stage.blocks:
        # It begins with the last block and what is in none, which are whole too.
        last = stage.blocks[-1][0]
        left = (inside - (last.parameters - last.sharded + last.sharded / tp)) * (1 - cols.gathered_ratio)
        missing = data.gather(left * form.gathered, fixed_cost, (pieces - 2) * (1 - cols.gathered_ratio))
    gather_backward = np.maximum(
        missing - backward * constants.max_overlap, missing * (1 - constants.max_overlap)
    )
    gather_time = np.where(gathered_at("pass", zero), accum * (gather_forward + gather_backward), 0.0)
    gather_time = np.where(ahead_of_step, gather_forward, gather_time) * (dp > 1)

    # Update: reads and writes every state once, several times where operators are not fused.
    owned = weights / np.where(cut("optimizer", zero), share, 1.0)
    states = owned * (2 * form.optimizer + 2 * (form.master or form.parameter) + form.gradient)
    passes = np.where(cols.fused_optimizer, 1.0, 3.0)
    on_host = cols.offload == "optimizer"
    update = np.where(on_host, 0.0, passes * states / _bandwidth(hardware, constants))
    if setup.gradient_copy:
        # Added to the accumulator after every micro-batch.
        update = update + accum * weights * (2 * form.gradient + form.parameter) / _bandwidth(
            hardware, constants
        )
    moved = owned * (form.gradient + form.parameter)
    offload = np.where(
        on_host, moved / (hardware.host_gb_per_s * 1e9) + states / (constants.host_update_gb_per_s * 1e9), 0.0
    )
    terms = {
        "matmul": accum * matmul,
        "attention": accum * attention,
        "memory-bound": accum * memory,
        "recomputation": accum * again,
        "launches": accum * launches,
        "tensor parallel": accum * tensor_time,
        "data parallel": data_time,
        "parameter gathers": gather_time,
        "pipeline transfers": transfer,
        "bubble": bubble,
        "optimizer": update,
        "offload": offload,
        "stalls": none,
        "allocator retries": none,
        "fixed": none + constants.step_ms * 1e-3,
    }
    terms["stalls"] = _stalls(terms, pp, cols, hardware, constants)
    return terms


def crossings(pp: int, cols: Columns) -> np.ndarray:
    """Boundaries between ranks that a micro-batch crosses on its way forward, at the rank that has most.

    Two a chunk, but for the ends of the model and where a V turns within a rank: interleaving multiplies them
    by the chunks (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    chunks = cols.virtual_stages.astype(float)
    loop = np.where((chunks > 1) & (pp == 2), 2 * chunks - 1, chunks * min(pp - 1, 2))
    return np.where(cols.order_that("v_shaped"), chunks * min(pp - 1, 2), loop)


def idle_slot(
    slot: np.ndarray, forward: np.ndarray, backward: np.ndarray, of_weights: np.ndarray, hop: np.ndarray,
    cols: Columns,
) -> np.ndarray:  # fmt: skip
    """Seconds for which each other stage waits for this one while the pipeline fills and drains.

    The bubble is their sum over the other stages: p - 1 times this where all are equal. With F the forward of a
    micro-batch on a rank, B the gradients of its inputs, W those of its weights, and v the rank's chunks:

    - `1f1b`, `gpipe`: F + B + W (Narayanan et al., arXiv:2104.04473, section 2.2)
    - `interleaved`: (F + B + W) / v (likewise)
    - `zero_bubble`: (F + B - W) / v, a third of that where F = B = W (ZB-H1 of Qi et al., arXiv:2401.10241,
      section 2.3)
    - `zbv`: the largest less the smallest of F, B and W, as there is no bubble where they are equal (section
      6); but B / 2 at least, since torch computes B and W of the model's first stage together

    The tests play through the order of actions that torch makes.
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


def _stalls(
    terms: Mapping[str, np.ndarray], pp: int, cols: Columns, hardware: Hardware, constants: Constants
) -> np.ndarray:
    """A run stalls or does not: what brings the step to the expected logarithm of its time, seconds."""
    total = sum(value for name, value in terms.items() if name != "stalls")
    hops = (cols.grad_accum + pp - 1) * 2.0 * min(pp - 1, 2)
    chance = stall_chance(cols, hardware, constants)
    return total * np.expm1(chance * np.log1p(hops * constants.stall_ms * 1e-3 / total))


def stall_chance(cols: Columns, hardware: Hardware, constants: Constants) -> np.ndarray:
    """Chance that a run's pipeline stalls on the network, from 0 to 1; see `Constants.stall_ms`."""
    nodes = cols.tp * cols.pp * cols.dp / hardware.devices_per_node
    least = constants.stall_least
    chance = least + (1 - least) / (1 + (constants.stall_nodes / nodes) ** 6)
    if constants.stalls_without_zero:
        # The more gradient rings there are beside the pipeline, the likelier.
        rings = 1 / (1 + (constants.stall_rings / (cols.dp * nodes)) ** 3)
        chance = np.where((cols.zero == 0) & (cols.dp > 1), np.maximum(chance, rings), chance)
    possible = (nodes > 1) & (cols.pp > 1) & (constants.stall_ms > 0)
    return np.where(possible, chance, 0.0)


def _hidden(facts: ModelFacts) -> float:
    """Elements of a token between blocks."""
    boundary = next((part.boundary for part in facts.parts if part.role == "block"), 0.0)
    return boundary / _residual(facts)


def _residual(facts: ModelFacts) -> int:
    """Bytes of an element between blocks: fp32 under autocast."""
    return 2 if facts.precision == "bf16_pure" else 4
