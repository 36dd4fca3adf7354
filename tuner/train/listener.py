"""What a training tells while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .chosen import Strategy


class TrainListener:
    """Hears of a training's progress; by default does nothing."""

    def on_start(self, training: "TrainingStart") -> None:
        """The training starts, or goes on."""

    def on_wait(self, what: str) -> None:
        """Something slow is being prepared."""

    def on_read(self, share: float) -> None:
        """So much of the data is read, from 0 to 1; told now and then."""

    def on_line(self, line: Mapping[str, Any]) -> None:
        """A line of the log."""

    def on_message(self, message: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """What a training sets out to do."""

    name: str
    """What is trained."""
    folder: Path
    """Where."""
    strategy: Strategy
    """In which configuration."""
    where: str
    """On what, in words."""
    data: Mapping[str, Any]
    """What on: what the samples say of themselves."""
    steps: int
    """Steps in all."""
    step: int
    """Steps that are done."""
    unit: str
    """What throughput counts."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """How it learns."""
