"""Time of one micro-batch on a rank, forward and backward, and the waits of a pipeline.

Source: pipelines, Narayanan et al., arXiv:2104.04473.
"""

from dataclasses import dataclass, fields

import numpy as np

from .facts.model_facts import Rebuilt
from .links import TimedRank, boundary_width, residual_bytes, ring_waits
from .stages import crossings, idle_slot
from .work import Work


@dataclass(slots=True)
class Slot:
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
    slow_host: np.ndarray
    """Further time that they would wait for a host that is slower by one standard deviation."""
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


def slot_of(rank: TimedRank, work: Work) -> Slot:
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
    if rank.setup.overlap_experts and rank.links.uses["ep"]:
        # Exchanges of one micro-batch overlap with both passes of another one.
        most = rank.links.constants.max_overlap
        rows = np.maximum(rows - most * (forward + backward) / 2, (1 - most) * rows)
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
    if any(part.rebuilt != Rebuilt() for part in rank.parts):
        whole = 1 - ratio
        products, attention, traffic, exchanged = (
            whole * np.array([[getattr(part.rebuilt, field.name)] for part in rank.parts]) for field in fields(Rebuilt)
        )
        repeated = products * work.matmul + attention * work.attention
        rebuilt, of_products = rebuilt + repeated + traffic * work.memory, of_products + repeated
        home = home + exchanged * rows
    links = back + ratio * (ahead + there) + home
    host = work.host + pairs * start
    host_back = (2 + again) * work.host + pairs * (1 + regathered / 2 + ratio) * start
    busy, busy_back = forward + ahead + there, backward + rebuilt + links
    slack, slack_back = np.maximum(host - busy, 0.0), np.maximum(host_back - busy_back, 0.0)
    slower = np.exp(rank.links.constants.launch_std)
    slow = np.maximum(slower * host - busy, 0.0) + np.maximum(slower * host_back - busy_back, 0.0) - slack - slack_back

    def total(seconds: np.ndarray) -> np.ndarray:
        return (counts * seconds).sum(axis=0)

    return Slot(
        matmul=total(work.matmul + work.matmul_back),
        attention=total(work.attention + work.attention_back),
        memory=total(work.memory + work.memory_back),
        again=total(rebuilt),
        products=total(work.matmul + work.attention + computed + of_products),
        launches=total(slack + slack_back),
        slow_host=total(slow),
        tensor=total(ahead + back + ratio * ahead),
        exchange=total((1 + ratio) * (exchange + around) + exchange + around_back),
        rows=total((2 + ratio) * rows),
        uneven=total(late * ((1 + ratio) * work.experts + work.experts_back)),
        forward=total(busy + slack),
        backward=total(busy_back + slack_back),
        of_weights=total(work.matmul_back - work.matmul),
    )


def pipeline(rank: TimedRank, slot: Slot) -> tuple[np.ndarray, np.ndarray]:
    """Transfers between stages, m crossings of each boundary in each direction, and the bubble of each flush (`idle_slot`)."""
    several = rank.cols.pp > 1
    if not several.any():
        return rank.none, rank.none
    hardware, constants, cols = rank.links.hardware, rank.links.constants, rank.cols
    sequence = np.where(cols.sequence_parallel | rank.setup.scatter_transfers, rank.tp, 1.0)
    moved = rank.tokens * boundary_width(rank.facts) * residual_bytes(rank.facts) / sequence
    near_rate, far_rate, crosses = rank.links.between_stages
    near, far = moved / near_rate, moved / far_rate
    # Of the boundaries of a stage that is smaller than a node, one at most is between nodes.
    other_boundaries = np.where(rank.tp * rank.replicas >= hardware.devices_per_node, 0, np.clip(cols.pp - 2, 0, 1))
    hop = np.where(crosses, (far + other_boundaries * near) / (1 + other_boundaries), near)
    hop = hop + constants.hop_ms * 1e-3 + rank.links.switch
    exposed = 1 - constants.max_overlap if rank.setup.overlap_transfers else 1.0
    transfer = exposed * rank.accum * 2.0 * crossings(cols.pp, cols) * hop
    idle = idle_slot(slot.total, slot.forward, slot.backward, slot.of_weights, hop, cols)
    samples = cols.micro_batch * cols.grad_accum
    flushes = np.ceil(samples / np.minimum(rank.setup.flushed_samples or samples, samples))
    return np.where(several, transfer, 0.0), flushes * (cols.pp - 1) * idle
