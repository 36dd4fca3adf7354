"""Programs that run as trials."""

from pathlib import Path

import cloudpickle
import psutil
import pytest
from processes import left_of
from redline.runners.host.client import HostAgent
from redline.runners.trial.job import Job, Outcome, Rendezvous


class Bench:
    """Runs programs as trials and checks that they leave no process."""

    def __init__(self, agent: HostAgent) -> None:
        self.agent = agent

    def run(self, program, *, ranks: int = 1, **job) -> Outcome:
        job.setdefault("timeout_s", 300)
        return self.agent.run(
            Job(
                program=cloudpickle.dumps(program),
                ranks=ranks,
                rendezvous=Rendezvous(world_size=ranks),
                threads=1,
                **job,
            )
        )

    def hang(self, program, shows, **job) -> tuple[Outcome, float, str]:
        """Runs a program that must exceed its deadline, with longer deadlines until `shows(log)` is true.

        A shorter deadline ends the program before it comes as far as it should. Returns the outcome, the deadline,
        and the log.
        """
        for deadline in (2, 8, 32, 128):
            outcome = self.run(program, timeout_s=deadline, **job)
            log = Path(job["log"]).read_text()
            if shows(log):
                break
        return outcome, deadline, log

    def left_behind(self) -> list[psutil.Process]:
        """Processes below the agent. None may remain between trials, except while they are reaped."""
        return left_of(psutil.Process(self.agent.pid).children(recursive=True), timeout=60)


@pytest.fixture(scope="session")
def bench(kept_agent):
    return Bench(kept_agent())
