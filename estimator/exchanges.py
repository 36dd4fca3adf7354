"""Terms of a step besides its micro-batches: exchanges of gradients and weights between replicas, the update, offload.

Source: ZeRO, Rajbhandari et al., arXiv:1910.02054, section 7.
"""

from dataclasses import replace

import numpy as np

from ..knobs.meaning import EXCHANGES, REDUCED, SUMMED, formats_of
from .knob_arrays import KnobArrays
from .links import TimedRank
from .memory import kept_bytes
from .rank import BYTES, Formats, gathered_at, tied_copy
from .setup import TrainingSetup
from .work import memory_rate


def reduced_bytes(cols: KnobArrays, form: Formats, setup: TrainingSetup, precision: str) -> np.ndarray:
    """Bytes of an element of a gradient in the exchange between replicas, shape (n,)."""
    if not setup.own:
        return np.full(len(cols), float(BYTES[setup.reduce_dtype] if setup.reduce_dtype else form.gradient))
    wide, narrow = (BYTES[formats_of({"precision": precision, "reduce_dtype": dtype}).reduced] for dtype in REDUCED)
    return np.where(cols.reduce_dtype == "bf16", float(narrow), float(wide))


def data_parallel(rank: TimedRank, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Time that backward does not hide of the gradients' reduction, the gather of weights after the update, and the wait of all
    ranks for the slowest.

    Gradients are reduced by an all-reduce if replicas are whole, otherwise by a reduce-scatter, block by block from ZeRO 2 on
    (Rajbhandari et al., arXiv:1910.02054, section 7). HSDP also sums pieces over the groups, with every micro-batch or the last.
    """
    links, cols, setup, zero = rank.links, rank.cols, rank.setup, rank.cols.zero
    constants, form = links.constants, rank.form
    travels, trained = reduced_bytes(cols, form, setup, rank.facts.precision), rank.trained_share
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


def tied_sum(rank: TimedRank) -> np.ndarray:
    """Sum of the gradients of a tied embedding over the end stages, after all passes: sent to the first one and back, or by an
    all-reduce of both."""
    stage, cols = rank.stage, rank.cols
    if not rank.facts.tied or stage.first == stage.last:
        return rank.none
    copy = tied_copy(stage if stage.last else replace(stage, first=False, last=True), rank.facts, rank.tp)
    pieces = np.where((cols.zero >= 2) & rank.setup.own, cols.shard_ranks, 1.0)
    near, far, crosses = rank.links.between_stages
    return (2.0 if rank.setup.own else 1.0) * copy / pieces * rank.form.gradient / np.where(crosses, far, near)


def parameter_gathers(rank: TimedRank, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def update_seconds(rank: TimedRank) -> np.ndarray:
    """The update on the device: every state at the memory's bandwidth, three times if operators are not fused."""
    form, bandwidth = rank.form, memory_rate(rank.links.hardware, rank.links.constants)
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


def _host_rate(rank: TimedRank) -> float:
    """Bytes a second between a device and host memory."""
    share = 1.0 if rank.setup.pinned_memory else rank.links.constants.pageable_share
    return rank.links.hardware.host_gb_per_s * 1e9 * share


def activation_transfers(rank: TimedRank, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Seconds of a step that the passes do not hide of activations' copies to host memory and back."""
    if not rank.setup.offload_activations:
        return rank.none
    once, most = kept_bytes(rank, rank.links.constants) / _host_rate(rank), rank.links.constants.max_overlap
    exposed = (np.maximum(once - most * busy, (1 - most) * once) for busy in (forward, backward))
    return rank.accum * sum(exposed, rank.none)


def offload_seconds(rank: TimedRank) -> np.ndarray:
    """The update in host memory, as in `schedule/offloaded.py`: gradients and weights are moved once a step by pinned copies over
    the device's own link, and all ranks of a node share the rate at which it updates states."""
    hardware, constants = rank.links.hardware, rank.links.constants
    moved = rank.owned * (rank.form.gradient + rank.form.parameter)
    rate = constants.host_update_gb_per_s
    if rank.setup.deepspeed_update:
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
    there = moved / _host_rate(rank) + rank.states * ranks / (rate * 1e9)
    return np.where(rank.cols.offload == "optimizer", there, 0.0)
