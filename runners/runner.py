"""The protocol of everything that tries a configuration."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..base.device import Device
from ..base.errors import UsageError
from ..base.writing import as_data
from ..results import Measurement
from ..results.probe import Probe
from ..results.schema import shown
from ..space import Config
from .soak import SoakPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What a correct candidate must reproduce."""

    probe: Probe
    """What the reference configuration computed on the probe's samples."""
    config_id: str = ""
    """Id of the configuration they come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """One configuration to try, and the terms on which it is tried."""

    config: Config
    """The configuration."""
    number: int
    """The trial's number; names its log."""
    log: Path | None = None
    """File for everything the ranks print; None discards it."""
    timeout_s: float | None = None
    """Deadline from request to result, compilation not counted, s; None for the runner's own."""
    best_throughput: float | None = None
    """Best so far, in the workload's unit; a candidate clearly slower stops early."""
    reference: Reference | None = None
    """What is to be reproduced; None for the trial that sets it."""
    soak: SoakPlan | None = None
    """How a workload's candidate is soaked afterwards; None for not at all."""
    sustained: bool = False
    """Whether it may be what wins, so that a GPU is to be at the clocks that it keeps while training."""

    @property
    def log_name(self) -> str:
        """The log relative to the run's folder, as a measurement keeps it; empty where there is none."""
        return f"logs/{self.log.name}" if self.log else ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping, by which another process tries the same; of the log it has the name."""
        reference, soak = self.reference, self.soak
        return {
            "config": as_data(self.config.to_dict()),
            "number": self.number,
            "log": self.log.name if self.log else None,
            "timeout_s": self.timeout_s,
            "best_throughput": None if self.best_throughput is None else float(self.best_throughput),
            "reference": reference and {"probe": reference.probe.to_dict(), "config_id": reference.config_id},
            "soak": soak and asdict(soak),
            "sustained": self.sustained,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], logs: Path | None = None) -> "TrialRequest":
        """The inverse of `to_dict`; unknown keys are ignored.

        Args:
            data: what `to_dict` made.
            logs: the folder of the log; None for no log.

        Raises:
            UsageError: a part is missing or of another type.
        """
        try:
            name, reference, soak = data["log"], data["reference"], data["soak"]
            if name is not None and not _LOG.fullmatch(name):
                raise UsageError(f"a log is called like 7.log, but got {shown(name)}")
            return cls(
                config=Config(data["config"]),
                number=int(data["number"]),
                log=logs / name if logs is not None and name is not None else None,
                timeout_s=_seconds(data["timeout_s"]),
                best_throughput=_seconds(data["best_throughput"]),
                reference=reference
                and Reference(probe=Probe.from_dict(reference["probe"]), config_id=str(reference["config_id"])),
                soak=soak and SoakPlan(**soak),
                sustained=data.get("sustained") is True,
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"what is to be tried is not described: {type(error).__name__} {error}") from error


_LOG = re.compile(r"\d{1,12}(\.[a-z]{1,12})?\.log")


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)


class Runner(ABC):
    """Dry-runs configurations. `run` may be called from `slots` threads at once."""

    name: ClassVar[str]
    """The name on the command line."""
    slots: int = 1
    """How many trials can run at the same time."""
    isolated: bool = True
    """Whether this process outlives whatever a trial does."""
    confirms: bool = True
    """Whether leaders are measured again at the end."""
    settle_s: float = 0.0
    """What a trial takes longer that is `sustained`, at most, s."""
    per_host: int | None = None
    """Devices that a host gives a trial, where that is for the runner to find out; None where it is not."""
    device: Device | None = None
    """The kind of devices that trials run on, where it is not this machine's."""
    closed: bool = False
    """Whether `close` was called; a trial that fails from then on is not tried again."""

    @property
    def takes_turns(self) -> bool:
        """Whether `take_turns` does anything."""
        return False

    def wait_ready(self) -> None:
        """Returns when trials can begin."""

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """The outcome of one trial. Failures of the candidate are measurements, not exceptions.

        Raises:
            RunnerError: the machinery failed (a lost agent or node); the trial may be tried again.
        """

    def take_turns(
        self, requests: Sequence[TrialRequest], alone: Sequence[Measurement], patience_s: float = 0.0
    ) -> list[list[Measurement]] | None:
        """Measures candidates in short turns while all are in memory.

        Args:
            requests: one for each candidate.
            alone: what each measured when it was tried: its memory must fit beside the others', and its turns take
                no longer together than that did, a few times over.
            patience_s: how much longer they may take, s, to outlast a load that others put on the machine.

        Returns:
            Of each candidate what each of its turns brought, or the one measurement of how it failed. None where they
            cannot be in memory at the same time, or where one of them has taken all with it.

        Raises:
            RunnerError: the machinery failed.
        """
        return None

    def close(self) -> None:
        """Ends every running trial and releases what the runner holds. May be called twice."""

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
