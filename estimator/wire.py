"""Prices of single communications: by the estimator's links, or by a table that was measured among real ranks here.

Notation: n ranks of a group; b bytes, for an all-gather or reduce-scatter those of all ranks together, else those that one rank
gives.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .collectives import group
from .constants import CPU, Constants
from .hardware import Hardware

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "send", "barrier")
"""What is priced. Receiving takes what sending takes."""


@dataclass(frozen=True, kw_only=True)
class WireTable:
    """Times of communications measured among real ranks on this machine."""

    ranks: int
    """That communicated at once, in groups of each size."""
    seconds: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]
    """By kind and group size: (bytes, s) in the order of bytes."""
    company: float = 1.0
    """By what a rank computes slower while all cores do, against one core at work."""

    def price(self, kind: str, num_bytes: int, ranks: int) -> float:
        """Seconds of one communication: between measured sizes in proportion to bytes, beyond the largest by the rate there."""
        sizes = self.seconds[kind]
        near = min(sizes, key=lambda size: abs(math.log(size / ranks)))
        points = sizes[near]
        if kind == "barrier":
            return points[0][1]
        index = next((at for at, (size, _) in enumerate(points) if size >= num_bytes), len(points) - 1)
        (small, low), (large, high) = points[max(0, index - 1)], points[max(1, index)]
        slope = max(0.0, (high - low) / (large - small))
        return max(points[0][1], low + slope * (num_bytes - small))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WireTable":
        """The inverse of `to_dict`."""
        seconds = {
            kind: {int(size): tuple((int(at), float(taken)) for at, taken in points) for size, points in sizes.items()}
            for kind, sizes in data["seconds"].items()
        }
        return cls(ranks=int(data["ranks"]), seconds=seconds, company=float(data["company"]))


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Prices communications on hardware."""

    hardware: Hardware
    devices: int
    """Of the training."""
    constants: Constants = field(default_factory=Constants)
    table: WireTable | None = None
    """Measured among ranks here; None prices by the hardware's links."""

    @staticmethod
    def on(hardware: Hardware, devices: int, table: WireTable | None = None) -> "Wire":
        """With the constants of redline's own training on that hardware."""
        constants = CPU if hardware.kind == "cpu" else Constants()
        return Wire(hardware=hardware, devices=devices, constants=constants, table=table)

    def price(self, kind: str, num_bytes: int, ranks: Sequence[int]) -> float:
        """Seconds that a communication takes once its ranks are there.

        Args:
            kind: one of `KINDS`, or `receive`.
            num_bytes: b.
            ranks: global ranks of the group; of a send or receive its two ends.
        """
        if len(ranks) < 2:
            return 0.0
        kind = "send" if kind == "receive" else kind
        if self.table is not None:
            return self.table.price(kind, num_bytes, len(ranks))
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
        # A broadcast or a reduction is a chain of pieces, of which each link carries all bytes once.
        return fixed + latency + num_bytes / rate

    @property
    def log_std(self) -> float:
        """Standard deviation of the logarithm of a price."""
        return MEASURED_STD if self.table is not None else self.constants.link_std

    def _group(self, ranks: Sequence[int]) -> Any:
        size, stride = len(ranks), max(1, abs(ranks[1] - ranks[0]))
        return group(np.array([size]), np.array([stride]), np.array([self.devices]), self.hardware, self.constants)


MEASURED_STD = 0.2
"""Standard deviation of the logarithm of a price from a table that was measured here: how the messages of a training, which
come while ranks compute, depart from messages of the same size in a row."""
