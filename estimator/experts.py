"""Costs of experts that are spread over ranks: exchange of rows, imbalance, and weights that only some ranks share.

| symbol | meaning |
|---|---|
| E, P | experts of a layer; ranks that share them (`ep`) |
| K, D | experts of a token; features of a token |
| s | deviation of an expert's rows from their mean, as a share of it (`Constants.expert_spread`) |
| f | capacity of an expert, relative to the mean of its rows (`capacity_factor`) |

Sources: exchanges of rows, Lepikhin et al., GShard, arXiv:2006.16668, section 3.2; the largest of P normal numbers lies about
sqrt(2 ln P) deviations above their mean (Cramer 1946, section 28.6).
"""

from dataclasses import dataclass

import numpy as np

from .collectives import Group, rates
from .constants import Constants
from .facts.model_facts import Part, bytes_of
from .hardware import Hardware
from .knob_arrays import KnobArrays


def imbalance(experts: int, ep: np.ndarray, constants: Constants) -> np.ndarray:
    """Ratio of the rows of the fullest of P ranks to their mean, 1 for one rank: 1 + s sqrt(P / E) sqrt(2 ln P), and at most P,
    if one rank has all."""
    ranks = np.minimum(ep, experts).astype(float)
    deviation = constants.expert_spread * np.sqrt(ranks / experts)
    return np.minimum(1 + deviation * np.sqrt(2 * np.log(ranks)), ranks)


def uneven(part: Part, cols: KnobArrays, constants: Constants) -> np.ndarray:
    """The imbalance of a part's mixtures; 1 without mixtures, and for experts with a capacity, which all compute as many rows."""
    experts = max((item.experts for item in part.matmuls), default=1)
    if experts == 1:
        return np.ones(len(cols))
    return np.where(cols.capacity_factor > 0, 1.0, imbalance(experts, cols.ep, constants))


def chosen(part: Part) -> float:
    """Experts of a token."""
    return max((item.rows * item.experts for item in part.matmuls if item.experts > 1), default=0.0)


def filled(cols: KnobArrays) -> np.ndarray:
    """Rows that experts compute, relative to those routed to them: f with a capacity, some of whose places may be empty."""
    return np.where(cols.capacity_factor > 0, cols.capacity_factor, 1.0)


def kept(part: Part, cols: KnobArrays, precision: str, constants: Constants) -> np.ndarray:
    """Extra bytes a token that the fullest rank keeps of a part compared with a rank that has all experts: inputs and outputs of
    products for its additional rows (fewer with f < 1), and the returned rows, from which the gradient of the experts' weights is
    computed."""
    excess = uneven(part, cols, constants) * filled(cols) - 1
    width, tp = bytes_of(precision), cols.expert_tp
    extra = np.where((cols.ep > 1) | (cols.capacity_factor > 0), part.routed * width * filled(cols), 0.0)
    for item in part.matmuls:
        if item.experts > 1:
            k, n = (size / tp if item.split == side else size for side, size in (("row", item.k), ("column", item.n)))
            extra = extra + excess * width * item.rows * item.count * (k + n)
    return extra / cols.token_splits


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
