"""A configuration that a training has, and why it is that one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...space import Config


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A configuration of a training, and why it is that."""

    config: Config
    """The configuration."""
    devices: int
    """On how many."""
    why: str
    """In a sentence for people."""
    step: int = 0
    """Steps that were done before."""

    def to_dict(self) -> dict[str, Any]:
        """As train.yaml keeps it."""
        return {
            "step": self.step,
            "devices": self.devices,
            "configuration": self.config.to_dict(),
            "why": self.why,
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "Strategy":
        """From what `to_dict` returned."""
        return Strategy(
            step=document["step"],
            devices=document["devices"],
            config=Config(document["configuration"]),
            why=str(document.get("why", "")),
        )


def in_words(devices: int) -> str:
    """How many devices, for a sentence."""
    return f"{devices} device{'s'[: devices > 1]}"
