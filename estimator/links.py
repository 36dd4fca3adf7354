"""Groups of ranks that communicate, and a rank with its links and its exchanges around attention.

Sources: collectives as rings by latency and bandwidth, Thakur et al. 2005; tensor and sequence parallelism, Korthikanti et al.,
arXiv:2205.05198.

K, D, T and P in the functions for sequences: heads of keys and their features, tokens of a sample, ranks of a ring.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .collectives import Group, Rows, group, rates, sole_share
from .constants import Constants
from .facts.model_facts import ModelFacts, Part, bytes_of
from .hardware import Hardware
from .kernels import products_of
from .knob_arrays import KnobArrays
from .rank import Rank, chosen, filled, shared, uneven
from .setup import TrainingSetup
from .stages import Stage


@dataclass(frozen=True)
class Links:
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
        moved = tokens * boundary_width(self.facts) * bytes_of(self.facts.precision)
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
class TimedRank(Rank):
    """A rank with its links."""

    links: Links

    @classmethod
    def of(cls, stage: Stage, links: Links, cols: KnobArrays) -> "TimedRank":
        """A rank of a stage; `cols` may differ from those of the links in their recomputation."""
        return cls(stage, links.facts, cols, links.setup, links)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the stage, blocks first."""
        return tuple(model_part for model_part, _ in self.stage.parts)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of each, shape (k, n)."""
        return np.stack([self.none + count for _, count in self.stage.parts])

    @cached_property
    def of_block(self) -> np.ndarray:
        """1 for repeated blocks, otherwise 0; shape (k, 1)."""
        return np.array([[1.0 if model_part.role == "block" else 0.0] for model_part in self.parts])

    @cached_property
    def pairs(self) -> np.ndarray:
        """Pairs of tensor parallelism's collectives in the forward pass of each part, shape (k, 1) or (k, n)."""
        usual = {"block": 2.0, "embedding": 1.0, "head": 1.0}
        pairs = np.array([[usual.get(model_part.role, 0.0)] for model_part in self.parts])
        if not self.links.uses["token_splits"]:
            return pairs
        # Ranks that divide tokens among whole experts gather outputs, or nothing with sequence parallelism.
        less = np.where(self.cols.sequence_parallel, 1.0, 1.5)
        has = np.array([[model_part.experts > 0] for model_part in self.parts])
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
            heads = np.stack(
                [all_to_alls(self, model_part, links.heads, links.collective) for model_part in self.parts]
            )
        if links.uses["ep"]:
            equal, share = self.cols.capacity_factor > 0, width * filled(self.cols) / self.cols.token_splits
            rows = np.stack(
                [
                    2
                    * links.experts.seconds(
                        self.tokens * model_part.routed * share,
                        links.collective,
                        equal,
                        chosen(model_part) if self.setup.rows_once_a_node else 0.0,
                    )
                    for model_part in self.parts
                ]
            )
            excess = np.stack([uneven(model_part, self.cols, links.constants) - 1 for model_part in self.parts])
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


def boundary_width(facts: ModelFacts) -> float:
    """Elements a token of the tensor between blocks."""
    boundary = next((model_part.boundary for model_part in facts.parts if model_part.role == "block"), 0.0)
    return boundary / residual_bytes(facts)


def residual_bytes(facts: ModelFacts) -> int:
    """Bytes of an element of the tensor between blocks: fp32 under autocast."""
    return 2 if facts.precision == "bf16_pure" else 4


def all_to_alls(rank: Rank, part: Part, ranks: Rows, fixed: float) -> np.ndarray:
    """Seconds of the all-to-alls around one block's attention in a forward pass: of queries, keys and values before it, and of
    its output; a rank sends all bytes but its own share (Jacobs et al., arXiv:2309.14509).

    Keys are repeated if there are fewer heads than ranks.

    Args:
        rank: the configurations.
        part: the block.
        ranks: those that exchange heads.
        fixed: seconds of a collective beyond those of its bytes and its ring.
    """
    kind, sp = part.attention, rank.cols.sp
    if kind is None or (sp == 1).all():
        return rank.none
    keys = np.lcm(np.maximum(kind.kv_heads // rank.cols.tp, 1), sp) * rank.tp
    width = kind.head_dim * bytes_of(rank.facts.precision) * rank.tokens / rank.tp
    return 2 * (ranks.seconds(width * kind.heads, fixed, True) + ranks.seconds(width * keys, fixed, True))


def ring_waits(
    rank: Rank, part: Part, ranks: Group, fixed: float, attention: np.ndarray, attention_back: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, forward and backward, that one block's attention waits for keys and values that are passed around a ring.

    P - 1 times in a forward pass a rank sends the keys and values of T / P tokens, 2 K D T (P - 1) / P numbers a sample, while it
    computes with the current ones; the excess over computing is waiting time. The backward pass repeats this, and sends their
    gradients in float32 after them, P times: the last time without computing (Liu et al., arXiv:2310.01889).

    Among ranks that exchange heads, each has its own ring.

    Args:
        rank: the configurations.
        part: the block.
        ranks: those of a ring.
        fixed: as above.
        attention, attention_back: seconds of the block's attention, forward and backward.
    """
    kind, cp = part.attention, rank.cols.cp
    if kind is None or (cp == 1).all():
        return rank.none, rank.none
    sp = rank.cols.sp
    heads = np.lcm(np.maximum(kind.kv_heads // rank.cols.tp, 1), sp)
    numbers = 2.0 * heads * kind.head_dim * rank.tokens * cp
    behind = (cp - 1) / cp
    fixed_of_ring = fixed * (cp - 1)
    there = ranks.gather(numbers * bytes_of(rank.facts.precision), fixed_of_ring)
    home = ranks.gather(numbers * 4, fixed_of_ring)
    forward = np.maximum(there - behind * attention, 0.0)
    backward = np.maximum(there + home - behind * attention_back, 0.0) + home / np.maximum(cp - 1, 1)
    return np.where(cp > 1, forward, 0.0), np.where(cp > 1, backward, 0.0)
