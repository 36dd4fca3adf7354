"""The interface of runners, which try configurations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..base.device import Device
from ..results import Measurement
from ..results.probe import Probe
from ..space import Config
from .trial.soak import SoakPlan


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
    soak: SoakPlan | None = None
    """The soak of the candidate after the measurement; None for none."""
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
    spare_cores: float = 0.0
    """Cores of a host that other processes may keep busy without slowing trials down."""
    per_host: int | None = None
    """Devices of a trial on each host if the runner determines that, after `wait_ready`; None otherwise."""
    waited_s: float = 0.0
    """Time that the first trial waited for devices that others use, s; known after `wait_ready`."""
    device: Device | None = None
    """Kind of the trials' devices if they are not this machine's."""
    closed: bool = False
    """True after `close`. A trial that fails from then on is not repeated."""

    @property
    def takes_turns(self) -> bool:
        """True if `take_turns` is supported."""
        return False

    def wait_ready(self) -> None:
        """Waits until trials can begin."""

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """Runs one trial. Failures of the candidate are measurements, not exceptions.

        Raises:
            RunnerError: the trial failed for a reason outside the candidate, such as a lost agent or node, and may be
                repeated.
        """

    def take_turns(
        self, requests: Sequence[TrialRequest], alone: Sequence[Measurement], patience_s: float = 0.0
    ) -> list[list[Measurement]] | None:
        """Measures candidates in short turns while all are in memory.

        Args:
            requests: one for each candidate.
            alone: the measurement of each candidate alone, which limits the memory of all together and the time of the
                turns.
            patience_s: additional time, s, to wait for other load on the machine to end.

        Returns:
            The measurements of each candidate, one per turn, or a single one if it failed. None if the candidates do
                not fit in memory together, or one of them ended all.

        Raises:
            RunnerError: as in `run`.
        """
        return None

    def stop(self, log: str) -> None:
        """Stops the trial that writes this log, if the runner can stop a single one."""

    def close(self) -> None:
        """Ends all trials and releases the runner's resources. May be called twice."""

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class WrappingRunner(Runner):
    """Base class of runners that change the trials of another one. All other properties are those of that runner.

    Args:
        runner: runs the trials.
        beside: another runner, which is started and closed with it.
    """

    def __init__(self, runner: Runner, beside: Runner | None = None) -> None:
        self.name = runner.name  # type: ignore[misc]  # that of the trials
        self.slots, self.isolated, self.confirms = runner.slots, runner.isolated, runner.confirms
        self.settle_s, self.spare_cores = runner.settle_s, runner.spare_cores
        self.per_host, self.device = runner.per_host, runner.device
        self._runner = runner
        self._all = (runner,) if beside is None else (beside, runner)

    @property
    def takes_turns(self) -> bool:
        return self._runner.takes_turns

    def wait_ready(self) -> None:
        for runner in self._all:
            runner.wait_ready()

    def take_turns(
        self, requests: Sequence[TrialRequest], alone: Sequence[Measurement], patience_s: float = 0.0
    ) -> list[list[Measurement]] | None:
        return self._runner.take_turns(requests, alone, patience_s)

    def stop(self, log: str) -> None:
        for runner in self._all:
            runner.stop(log)

    def close(self) -> None:
        self.closed = True
        for runner in self._all:
            runner.close()
