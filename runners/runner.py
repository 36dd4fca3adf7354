"""The interface of runners, which try configurations."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..base.device import Device
from ..results import Measurement
from ..results.probe import Probe
from ..space import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The results that a correct candidate must reproduce."""

    probe: Probe
    config_id: str = ""
    """Id of that configuration."""


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
    reference: Reference | None = None
    """Results to reproduce; None for the trial that defines them."""
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
