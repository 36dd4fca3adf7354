"""What the processes of a trial run, and what their reports come to, wherever they are."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..results import Measurement

if TYPE_CHECKING:
    from .dispatch import TrialTerms
    from .job import Job, Outcome
    from .runner import TrialRequest


class Work(ABC):
    """What is tried: dry runs of a workload, or calls of a function."""

    imports: tuple[str, ...]
    """Modules that a host agent imports once, for all trials."""
    several_hosts: bool = True
    """Whether the devices of a trial may be on several hosts."""
    confirms: bool = True
    """Whether leaders are measured again at the end."""

    @abstractmethod
    def job(self, request: "TrialRequest", terms: "TrialTerms") -> "Job":
        """The job of one trial."""

    def turns(self, measured: Measurement, outcome: "Outcome") -> list[Measurement]:
        """What each turn brought of a candidate that was measured in turns; by default all were one.

        Args:
            measured: what the outcome says of all turns.
            outcome: of its part of the job.
        """
        return [measured]

    @abstractmethod
    def measurement(
        self, request: "TrialRequest", terms: "TrialTerms", outcome: "Outcome", known: dict[str, Any]
    ) -> Measurement:
        """What the outcome of that job says.

        Args:
            request, terms: of the trial.
            outcome: how the job ended.
            known: fields of the measurement that do not depend on what was run.
        """
