"""Prices of single communications: by the estimator's links, or by a table measured among real ranks on this machine.

Notation: n ranks of a group; b bytes: those of all ranks together for an all-gather or reduce-scatter, otherwise those that one
rank sends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .collectives import group
from .constants import CPU, Constants
from .hardware import Hardware


class Price(NamedTuple):
    """Cost of a communication once all its ranks have reached it."""

    seconds: float
    core_s: float = 0.0
    """CPU time of each of its ranks meanwhile, s: on a CPU, copying and adding take cores from computing."""


@dataclass(frozen=True, kw_only=True)
class WireTable:
    """Times of communications measured among real ranks on this machine."""

    ranks: int
    """Number of ranks that communicated at once, in groups of each size."""
    seconds: Mapping[str, Mapping[int, Sequence[tuple[int, float, float]]]]
    """By kind and group size: (bytes, s, CPU s of a rank) in the order of bytes."""
    late: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]] = field(default_factory=dict)
    """By kind and group size: (s that ranks computed before a communication, s by which it then takes longer)."""
    company: float = 1.0
    """Slowdown factor of a rank's computing when all cores compute, relative to a single busy core."""

    def price(self, kind: str, num_bytes: int, ranks: int, computed_s: float = 0.0) -> Price:
        """Price of one communication: interpolated linearly in bytes between measured sizes, beyond the largest by its rate; and
        what it takes longer after so much computing."""
        points = _nearest(self.seconds[kind], ranks)
        sizes, *columns = zip(*points, strict=True)
        seconds, core_s = (_interpolated(sizes, values, num_bytes) for values in columns)
        return Price(seconds + self._later(kind, ranks, computed_s), core_s)

    def _later(self, kind: str, ranks: int, computed_s: float) -> float:
        if kind not in self.late or computed_s <= 0:
            return 0.0
        before, extra = zip((0.0, 0.0), *_nearest(self.late[kind], ranks), strict=True)
        return float(np.interp(computed_s, before, extra))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WireTable":
        """The inverse of `to_dict`."""
        tables = {
            name: {
                kind: {int(size): tuple(map(tuple, points)) for size, points in sizes.items()}
                for kind, sizes in data[name].items()
            }
            for name in ("seconds", "late")
        }
        return cls(ranks=data["ranks"], company=data["company"], **tables)


def _nearest(by_size: Mapping[int, Any], ranks: int) -> Any:
    return by_size[min(by_size, key=lambda size: abs(math.log(size / ranks)))]


def _interpolated(sizes: Sequence[int], values: Sequence[float], num_bytes: int) -> float:
    """Value at a number of bytes; beyond the largest size the last two continue."""
    if num_bytes <= sizes[-1] or len(sizes) == 1:
        return float(np.interp(num_bytes, sizes, values))
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return values[-1] + slope * (num_bytes - sizes[-1])


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Prices communications on hardware."""

    hardware: Hardware
    devices: int
    """Devices of the training."""
    constants: Constants = field(default_factory=Constants)
    table: WireTable | None = None
    """Table measured among ranks here; None prices by the hardware's links."""

    @staticmethod
    def on(hardware: Hardware, devices: int, table: WireTable | None = None) -> "Wire":
        """Prices with the constants of redline's own training on that hardware."""
        constants = CPU if hardware.kind == "cpu" else Constants()
        return Wire(hardware=hardware, devices=devices, constants=constants, table=table)

    def price(self, kind: str, num_bytes: int, ranks: Sequence[int], computed_s: float = 0.0) -> Price:
        """Price of a communication.

        Args:
            kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast`, `reduce`, `send`, `barrier` or
                `receive`, which costs as much as `send`.
            num_bytes: b.
            ranks: global ranks of the group, or the two ends of a send or receive.
            computed_s: what the ranks computed since their last communication; counts only on a CPU, where it delays the next.
        """
        if len(ranks) < 2:
            return Price(0.0)
        kind = "send" if kind == "receive" else kind
        if self.table is not None:
            return self.table.price(kind, num_bytes, len(ranks), computed_s)
        return Price(self._over_links(kind, num_bytes, ranks))

    def _over_links(self, kind: str, num_bytes: int, ranks: Sequence[int]) -> float:
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
        return MEASURED_STD if self.table is not None else self.constants.link_std

    def _group(self, ranks: Sequence[int]) -> Any:
        size, stride = len(ranks), max(1, abs(ranks[1] - ranks[0]))
        return group(np.array([size]), np.array([stride]), np.array([self.devices]), self.hardware, self.constants)


MEASURED_STD = 0.2
"""Standard deviation of the logarithm of a price from a measured table: messages of a training, sent while ranks compute, differ
from messages of the same size in a row."""
