"""Time of collectives: rings by latency and bandwidth, trees of nodes, and rows that are sent to experts.

Notation of `Rows`: K experts of a token. Notation of `Wire`: n ranks of a group; b bytes: those of all ranks together for an
all-gather or reduce-scatter, otherwise those that one rank sends.

Sources: Thakur et al. 2005; Sanders et al. 2009; exchanges of rows, Lepikhin et al., GShard, arXiv:2006.16668, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .constants import CPU, Constants
from .hardware import Hardware


@dataclass(frozen=True, slots=True)
class Group:
    """Groups of ranks that communicate: sizes and links. Arrays of length n."""

    size: np.ndarray
    bandwidth: np.ndarray
    """Bytes/s of one rank in a ring."""
    latency: np.ndarray
    """Seconds of an empty message once around the ring; each step takes as long as on its slowest link."""
    tree: np.ndarray
    """Seconds of an empty all-reduce up and down a tree of nodes."""

    def gather(self, total: np.ndarray, fixed: "np.ndarray | float", pieces: "np.ndarray | float" = 1.0) -> np.ndarray:
        """Seconds of all-gathers to `total` bytes on each rank, or of reduce-scatters of them, in `pieces` pieces."""
        steps = self.size - 1
        return np.where(
            self.size > 1, pieces * (fixed + self.latency) + total * steps / self.size / self.bandwidth, 0.0
        )

    def reduce(self, total: np.ndarray, fixed: float) -> np.ndarray:
        """Seconds of an all-reduce of `total` bytes: the faster of a ring (twice around) and a tree."""
        moved = 2 * total * (self.size - 1) / self.size / self.bandwidth
        latency = np.minimum(2 * self.latency, self.tree)
        return np.where(self.size > 1, fixed + latency + moved, 0.0)


STEPS_OF_A_LATENCY = 4
"""A link's latency is that of a small collective, of which a step of a ring takes a quarter."""


def rates(hardware: Hardware, constants: Constants) -> tuple[float, float]:
    """Bytes/s that a rank reaches on its links within a node, and on its share of the network."""
    inside = hardware.intra_node.gb_per_s * 1e9 * constants.link_efficiency
    return inside, hardware.inter_node.gb_per_s * 1e9 * constants.network_efficiency


ADAPTER_GB_PER_S = 12.5
"""Least rate of a network adapter of a node with several devices, 1e9 bytes/s (100 Gbit/s): devices with less share one."""


def sole_share(local: np.ndarray, hardware: Hardware) -> np.ndarray:
    """Shares of the network that a rank uses if it sends for `local` devices of its node, which do not send meanwhile: those of
    its adapter."""
    return np.minimum(local, max(1.0, ADAPTER_GB_PER_S / hardware.inter_node.gb_per_s))


def group(
    size: np.ndarray,
    stride: np.ndarray,
    devices: np.ndarray,
    hardware: Hardware,
    constants: Constants,
    *,
    sole: bool = False,
) -> Group:
    """Groups of `size` ranks that are `stride` apart; ranks fill nodes in order.

    With `sole`, one member on a node sends to the next node, as in a ring of sends from rank to rank.

    A ring that crosses nodes uses the network share of each of its members on a node, and every one of its steps waits for the
    network (Thakur et al. 2005: the latency of a step is that of the slowest link). All-reduces can use NCCL's double binary
    trees instead, whose depth is logarithmic (Sanders et al. 2009).
    """
    per_node = hardware.devices_per_node
    crosses = size * stride > per_node
    local = np.clip(per_node // np.maximum(stride, 1), 1, size)
    nodes = np.maximum(devices / per_node, 1.0)
    inside, network_rate = rates(hardware, constants)
    near = hardware.intra_node.latency_us / STEPS_OF_A_LATENCY * 1e-6
    far = hardware.inter_node.latency_us * 1e-6
    depth = np.where(crosses, np.ceil(np.log2(np.maximum(np.ceil(size / local), 1))), 0)
    share = sole_share(local, hardware) if sole else np.minimum(local, constants.network_rails)
    outside = np.minimum(network_rate * share / (1 + constants.scale_loss * np.log2(nodes)), inside)
    return Group(
        size=size.astype(float),
        bandwidth=np.where(crosses, outside, inside),
        latency=(size - 1) * np.where(crosses, far, near),
        tree=2 * (depth * far + (local - 1) * near),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Ranks that send rows to each other's experts. Arrays of length n."""

    near: np.ndarray
    """Bandwidth of a rank to ranks on its node, bytes/s."""
    far: np.ndarray
    """Bandwidth of a rank to all other ranks, bytes/s: it sends to each directly, over its own share of the network."""
    local: np.ndarray
    """Ranks of the group on a node."""
    group: Group

    @classmethod
    def of(cls, group: Group, stride: np.ndarray, hardware: Hardware, constants: Constants) -> "Rows":
        """Rows of a group of ranks that are `stride` apart."""
        size = len(stride)
        inside, outside = rates(hardware, constants)
        local = np.clip(hardware.devices_per_node // np.maximum(stride, 1), 1, group.size)
        return cls(near=np.full(size, inside), far=np.full(size, min(outside, inside)), local=local, group=group)

    def seconds(
        self, total: np.ndarray, fixed: float, equal: "np.ndarray | bool" = False, copies: float = 0.0
    ) -> np.ndarray:
        """Seconds of one exchange in which a rank sends `total` bytes, evenly to all ranks including itself; both directions run
        at once.

        Args:
            equal: True where the sizes are known beforehand.
            copies: K, the rows of a token, if one is sent to each node and distributed there; 0 if each is sent by itself.
                K even choices among N nodes meet N (1 - (1 - 1 / N)^K) of them.
        """
        ranks = self.group.size
        near, far = total * (self.local - 1) / ranks / self.near, total * (ranks - self.local) / ranks / self.far
        if copies:
            nodes = ranks / self.local
            far = far * nodes * (1 - (1 - 1 / nodes) ** copies) / copies
        # Unless they are known, the row counts are sent first, and the host waits for them.
        ahead = np.where(equal, 1, 2) * fixed + self.group.latency / np.maximum(ranks - 1, 1)
        return np.where((ranks > 1) & (total > 0), ahead + np.maximum(near, far), 0.0)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Prices communications on hardware."""

    hardware: Hardware
    devices: int
    """Devices of the training."""
    constants: Constants = field(default_factory=Constants)

    @staticmethod
    def on(hardware: Hardware, devices: int) -> "Wire":
        """Prices with the constants of redline's own training on that hardware."""
        constants = CPU if hardware.kind == "cpu" else Constants()
        return Wire(hardware=hardware, devices=devices, constants=constants)

    def price(self, kind: str, num_bytes: int, ranks: Sequence[int]) -> float:
        """Time of a communication once all its ranks have reached it, s.

        Args:
            kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast`, `reduce`, `send`, `barrier` or
                `receive`, which costs as much as `send`.
            num_bytes: b.
            ranks: global ranks of the group, or the two ends of a send or receive.
        """
        if len(ranks) < 2:
            return 0.0
        kind = "send" if kind == "receive" else kind
        over = self._group(ranks)
        total, fixed = np.array([float(num_bytes)]), self.constants.collective_us * 1e-6
        n = len(ranks)
        if kind == "all-reduce":
            return float(over.reduce(total, fixed)[0])
        if kind in ("all-gather", "reduce-scatter"):
            return float(over.gather(total, fixed)[0])
        rate, latency = float(over.bandwidth[0]), float(over.latency[0])
        if kind == "send":
            return self.constants.hop_ms * 1e-3 + latency + num_bytes / rate
        if kind == "all-to-all":
            # Each rank keeps its own piece.
            return fixed + latency + num_bytes * (n - 1) / n / rate
        # A broadcast or a reduction is a chain of pieces; each link carries all bytes once.
        return fixed + latency + num_bytes / rate

    @property
    def log_std(self) -> float:
        """Standard deviation of the logarithm of a price."""
        return self.constants.link_std

    def _group(self, ranks: Sequence[int]) -> Group:
        size, stride = len(ranks), max(1, abs(ranks[1] - ranks[0]))
        return group(np.array([size]), np.array([stride]), np.array([self.devices]), self.hardware, self.constants)
