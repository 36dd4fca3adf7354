"""What a search tells while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Trial

if TYPE_CHECKING:
    from .result import Result


class SearchListener:
    """Hears of a search's progress; the calls come from the search's own thread. By default does nothing."""

    def on_start(self, plan: "SearchPlan") -> None:
        """The search starts, or goes on after a resume."""

    def on_wait(self, what: str) -> None:
        """Something slow is being prepared."""

    def on_trial_start(self, trial: Trial) -> None:
        """A trial was handed to the runner."""

    def on_trial_end(self, trial: Trial) -> None:
        """A trial has an outcome."""

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        """The leaders are measured again: `done` of `total` turns are over, and those that follow are expected to take
        `seconds`, all of them together."""

    def on_alternate(self, leaders: list[Trial], seconds: float) -> None:
        """The leaders are measured again in short turns, all of them in memory, which takes about `seconds`."""
        self.on_remeasure(leaders, 0, 1, seconds)

    def on_message(self, message: str) -> None:
        """Something the user should know."""

    def on_end(self, result: "Result") -> None:
        """The search is over, and this came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """What a search sets out to do."""

    name: str
    """What is tuned."""
    where: str
    """On what, in words."""
    valid: int | None
    """Valid configurations; None where there are too many to count."""
    trials: int | None
    """Trials in all, or None for no limit."""
    seconds: float | None
    """Time limit, or None."""
    sampler: str
    """Who proposes."""
    runner: str
    """Who runs."""
    default: Mapping[str, Any] | None = None
    """The configuration that others are compared with; None for none."""
    derived: frozenset[str] = frozenset()
    """Knobs that follow from others."""
    earlier: tuple[Trial, ...] = ()
    """Trials finished before a resume."""
    folder: Path | None = None
    """Where the run is kept; None where it is not."""

    @property
    def done(self) -> int:
        """How many trials finished before a resume."""
        return len(self.earlier)
