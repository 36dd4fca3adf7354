"""What the process of a trial does with a command: has it run, on another port where one is taken, or as one of several hosts."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...results import Measurement, Status
from .ending import outcome
from .run import Run, RunTerms

if TYPE_CHECKING:
    from ..rank import RankContext

SILENT_S = 10.0
"""How long a host that has told nothing waits for another to do so once its command has ended, s."""
PORTS = 3
"""How often a command is started that finds its port taken."""


@dataclass(frozen=True, kw_only=True)
class CommandReport:
    """What a trial's process returns."""

    measured: Measurement
    """What came of it."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """What it told of its loss, by step."""
    silent: bool = False
    """Whether it has ended well, and told nothing."""
    echo: bool = False
    """Whether it failed and said no reason of its own, as those do that lose a peer."""


@dataclass(frozen=True, kw_only=True)
class CommandTrial:
    """One trial of a command. Called in a process of its own, below which everything is ended afterwards."""

    terms: RunTerms
    """What is started, and how it is read."""
    takes_port: bool
    """Whether the port is given to it."""

    def __call__(self, context: "RankContext") -> CommandReport:
        Path(self.terms.folder).mkdir(parents=True, exist_ok=True)
        context.phase("the command")
        if context.world_size > 1:
            return self._on_one_of(context)
        for attempt in range(PORTS):
            run = Run(self.terms, {**self.terms.values, "master_port": _free_port()}, context.peak)
            report = _report(run)
            if not self._port_taken(run, report) or attempt == PORTS - 1:
                break
            print(f"redline: the port {run.values['master_port']} is taken; started again on another", flush=True)
        return report

    def _on_one_of(self, context: "RankContext") -> CommandReport:
        """Its part on one of several hosts.

        Raises:
            RuntimeError: the port is taken; whoever started it on all hosts tries another.
        """
        where = urlsplit(context.init_method)
        hosts = {
            "hosts": context.world_size,
            "node_rank": context.rank,
            "devices_per_host": self.terms.values["devices"] // context.world_size,
            "master_addr": where.hostname,
            "master_port": where.port,
        }
        run = Run(self.terms, {**self.terms.values, **hosts}, context.peak)
        report = _report(run)
        if self._port_taken(run, report):
            raise RuntimeError(f"EADDRINUSE: the port {where.port} is taken")
        if report.silent:
            # Of most trainings one host tells something, which ends this one.
            time.sleep(SILENT_S)
        return report

    def _port_taken(self, run: Run, report: CommandReport) -> bool:
        """Whether another port may help: some say that one is taken, take another themselves and go on."""
        return report.measured.status is Status.CRASH and run.port_taken and self.takes_port


def _report(run: Run) -> CommandReport:
    """Has it run, and what came of it."""
    try:
        timing = run.timed()
    except OSError as error:
        reason = f"the command cannot be started: {error.strerror or error}"
        return CommandReport(measured=Measurement(status=Status.CRASH, reason=reason))
    measured = outcome(run, timing)
    silent = run.process.returncode == 0 and not run.costs and not run.out_of_memory
    echo = measured.status is Status.CRASH and not run.error
    return CommandReport(measured=measured, losses=run.losses, silent=silent, echo=echo)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
