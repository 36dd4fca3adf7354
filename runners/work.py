"""What the processes of a trial run, and what their reports come to, wherever they are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from ..base.device import Device
from ..results import Measurement
from .timing import TimingPlan

if TYPE_CHECKING:
    from .job import Job, Outcome
    from .runner import TrialRequest


DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class TrialTerms:
    """What holds for every trial of a run."""

    device: Device
    """Where trials run."""
    devices: int = 1
    """Devices of one trial, which is also its number of ranks."""
    memory_limit_mib: float | None = None
    """Memory a rank may take, MiB."""
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Deadline of a trial that brings none of its own, s; None for none. Compilation has as long again, and five minutes at
    least."""
    threads: int | None = None
    """CPU threads of a rank."""
    plan: TimingPlan = field(default_factory=TimingPlan)
    """How long a candidate is measured."""
    seed: int = 0
    """Seed of weights and data."""


class Known(TypedDict):
    """Fields of a measurement that do not depend on what was run."""

    devices: int
    started: float
    seconds_total: float
    log: str


class Work(ABC):
    """What is tried: dry runs of a workload, calls of a function, or runs of a command."""

    imports: tuple[str, ...]
    """Modules that a host agent imports once, for all trials."""
    several_hosts: bool = True
    """Whether the devices of a trial may be on several hosts."""
    confirms: bool = True
    """Whether leaders are measured again at the end."""
    in_turns: bool = True
    """Whether candidates can be in memory together, and take turns."""

    @abstractmethod
    def job(self, request: "TrialRequest", terms: TrialTerms) -> "Job":
        """The job of one trial."""

    def turns(self, measured: Measurement, outcome: "Outcome") -> list[Measurement]:
        """What each turn brought of a candidate that was measured in turns; by default all were one.

        Args:
            measured: what the outcome says of all turns.
            outcome: of its part of the job.
        """
        return [measured]

    @abstractmethod
    def measurement(self, request: "TrialRequest", terms: TrialTerms, outcome: "Outcome", known: Known) -> Measurement:
        """What the outcome of that job says.

        Args:
            request, terms: of the trial.
            outcome: how the job ended.
            known: fields of the measurement that do not depend on what was run.
        """
