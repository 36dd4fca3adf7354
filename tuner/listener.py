"""Events of a search."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Trial
from .budget import counts

if TYPE_CHECKING:
    from .result import Result


class SearchListener:
    """Receives the events of a search, in the search's own thread. Override any method; by default each does nothing."""

    def on_start(self, plan: "SearchPlan") -> None:
        """Called when the search starts or resumes."""

    def on_wait(self, stage: str) -> None:
        """Called before a slow preparation step, which `stage` describes."""

    def on_trial_start(self, trial: Trial) -> None:
        """Called when a trial is handed to the runner."""

    def on_trial_end(self, trial: Trial) -> None:
        """Called when a trial has an outcome."""

    def pauses(self) -> bool:
        """Returns True to interrupt the search when the trials in progress have ended. Called before each trial."""
        return False

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        """Called before each turn in which a leader is measured again, with that one, and after each round with all that took
        part: `done` of `total` turns are over, and the others should take `seconds` in all.
        """

    def on_message(self, message: str) -> None:
        """Called with a note or warning for the user."""

    def on_end(self, result: "Result") -> None:
        """Called with the result when the search is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """Scope and limits of a search."""

    name: str
    """Name of the target."""
    model_class: str | None = None
    """Class of the model in transformers; None for other targets."""
    where: str
    """Description of the hardware."""
    valid: int | None
    """Number of valid configurations; None if there are too many to count."""
    trials: int | None
    """Limit on the number of trials, or None."""
    seconds: float | None
    """Time limit, or None."""
    sampler: str
    runner: str
    default: Mapping[str, Any] | None = None
    """Configuration that others are compared with, or None."""
    derived: frozenset[str] = frozenset()
    """Knobs whose values follow from others."""
    earlier: tuple[Trial, ...] = ()
    """Trials finished before a resume."""
    folder: Path | None = None
    """Folder of the run, or None if it is not saved."""

    @property
    def done(self) -> int:
        """Number of trials of the budget that were finished before a resume."""
        return sum(map(counts, self.earlier))
