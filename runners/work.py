"""The work of a trial's processes: their program, and the measurement from their reports."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from ..base.device import Device
from ..results import Measurement
from .trial.timing import TimingPlan

if TYPE_CHECKING:
    from .runner import TrialRequest
    from .trial.job import Job, Outcome


DEFAULT_TIMEOUT_S = 300.0
"""Deadline of a trial without compilation, s."""
LEAST_COMPILE_TIMEOUT_S = 300.0
"""Smallest time limit of a trial's compilations, s."""


@dataclass(frozen=True, kw_only=True)
class TrialTerms:
    """Settings of all trials of a run."""

    device: Device
    devices: int = 1
    """Devices of one trial, which is also its number of ranks."""
    memory_limit_mib: float | None = None
    """Memory limit of a rank, MiB."""
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Default deadline of a trial, s; None for none. Compilation has the same time again, and at least five minutes."""
    threads: int | None = None
    """CPU threads of a rank."""
    plan: TimingPlan = field(default_factory=TimingPlan)
    seed: int = 0
    """Seed of weights and data."""


class CommonFields(TypedDict):
    """Fields of a measurement that do not depend on the work."""

    devices: int
    started: float
    seconds_total: float
    log: str


class Work(ABC):
    """The work of trials: dry runs of a workload, calls of a function, or runs of a command."""

    imports: tuple[str, ...]
    """Modules that a host agent imports once, before it forks the processes of trials."""
    several_hosts: bool = True
    """True if the devices of a trial may be on several hosts."""
    confirms: bool = True
    """True if leaders are measured again at the end."""

    @abstractmethod
    def job(self, request: "TrialRequest", terms: TrialTerms) -> "Job":
        """Returns the job of a trial."""

    @abstractmethod
    def measurement(
        self, request: "TrialRequest", terms: TrialTerms, outcome: "Outcome", common: CommonFields
    ) -> Measurement:
        """Returns the measurement for the outcome of a job.

        Args:
            request, terms: of the trial.
            outcome: of the job.
            common: fields of the measurement that do not depend on the work.
        """
