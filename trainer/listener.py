"""Events of a training, and the configuration that it runs in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


class TrainListener:
    """Receives the events of a training. Override any method; by default each does nothing."""

    def on_start(self, training: "TrainingStart") -> None:
        """Called when the training starts or continues."""

    def on_wait(self, stage: str) -> None:
        """Called before a slow preparation step, which `stage` describes."""

    def on_read(self, share: float) -> None:
        """Called now and then with the share of the data that is read, from 0 to 1."""

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Called with each line of the log."""

    def on_message(self, message: str) -> None:
        """Called with a note or warning for the user."""


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """A training as it starts or continues."""

    name: str
    folder: Path
    strategy: TrainingStrategy
    where: str
    """Description of the hardware."""
    data: Mapping[str, Any]
    steps: int
    """Number of steps in all."""
    step: int
    """Number of steps done."""
    unit: str
    """Unit that throughput counts."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
