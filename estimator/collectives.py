"""Time of collectives: rings by latency and bandwidth, and trees of nodes.

Sources: Thakur et al. 2005; Sanders et al. 2009.
"""

from dataclasses import dataclass

import numpy as np

from .constants import Constants
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
