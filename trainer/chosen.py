"""A configuration of a training, and the reason for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..space import Config


@dataclass(frozen=True, kw_only=True)
class TrainingStrategy:
    """A configuration of a training, and the reason for it."""

    config: Config
    devices: int
    why: str
    """Reason, in a sentence."""
    step: int = 0
    """Number of steps done before it."""

    def to_dict(self) -> dict[str, Any]:
        """Converts to the form of train.yaml."""
        return {
            "step": self.step,
            "devices": self.devices,
            "configuration": self.config.to_dict(),
            "why": self.why,
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "TrainingStrategy":
        """Converts back from `to_dict`."""
        return TrainingStrategy(
            step=document["step"],
            devices=document["devices"],
            config=Config(document["configuration"]),
            why=str(document.get("why", "")),
        )


def devices_text(devices: int) -> str:
    """Returns a number of devices as text."""
    return f"{devices} device{'s'[: devices > 1]}"
