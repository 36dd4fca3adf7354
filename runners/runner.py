"""The interface of runners, which try configurations, and of the work that a trial's processes do."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypedDict

from ..base.device import Device
from ..results import Measurement
from ..results.probe import Probe
from ..space import Config
from .trial.timing import TimingPlan

if TYPE_CHECKING:
    from .trial.job import Job, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """A configuration to try, with the settings of the trial."""

    config: Config
    number: int
    """Number of the trial; names its log."""
    log: Path | None = None
    """File for the output of the ranks; None to discard it."""
    timeout_s: float | None = None
    """Deadline from request to result, without compilation, s; None for the runner's default."""
    best_throughput: float | None = None
    """Best throughput so far, in the workload's unit. A clearly slower candidate stops early."""
    reference: Probe | None = None
    """Probe of the trial whose results a correct candidate reproduces; None for the trial that defines them."""
    sustained: bool = False
    """True if it may win, so that a GPU must be measured at the clocks that it sustains."""

    @property
    def log_name(self) -> str:
        """Path of the log relative to the run's folder, as stored in a measurement; empty without a log."""
        return f"logs/{self.log.name}" if self.log else ""


class Runner(ABC):
    """Tries configurations. `run` may be called from `slots` threads at once."""

    name: ClassVar[str]
    """Name on the command line."""
    slots: int = 1
    """Number of trials that can run at once; known after `wait_ready`."""
    isolated: bool = True
    """True if a trial cannot end this process."""
    confirms: bool = True
    """True if leaders are measured again at the end."""
    settle_s: float = 0.0
    """Longest additional time of a trial with `TrialRequest.sustained`, s."""
    per_host: int | None = None
    """Devices of a trial on each host if the runner determines that, after `wait_ready`; None otherwise."""
    waited_s: float = 0.0
    """Time that the first trial waited for devices that others use, s; known after `wait_ready`."""
    device: Device | None = None
    """Kind of the trials' devices if they are not this machine's."""
    closed: bool = False
    """True after `close`. A trial that fails from then on is not repeated."""

    def wait_ready(self) -> None:
        """Waits until trials can begin."""

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """Runs one trial. Failures of the candidate are measurements, not exceptions.

        Raises:
            RunnerError: the trial failed for a reason outside the candidate, such as a lost agent or node, and may be
                repeated.
        """

    def stop(self, log: str) -> None:
        """Stops the trial that writes this log, if the runner can stop a single one."""

    def close(self) -> None:
        """Ends all trials and releases the runner's resources. May be called twice."""

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


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
