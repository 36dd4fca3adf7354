"""Prices of single communications by the estimator's links.

Notation: n ranks of a group; b bytes: those of all ranks together for an all-gather or reduce-scatter, otherwise those that one
rank sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .collectives import group
from .constants import CPU, Constants
from .hardware import Hardware


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

    def _group(self, ranks: Sequence[int]) -> Any:
        size, stride = len(ranks), max(1, abs(ranks[1] - ranks[0]))
        return group(np.array([size]), np.array([stride]), np.array([self.devices]), self.hardware, self.constants)
