"""Tasks that a host agent runs in place of a search."""

import os
from dataclasses import dataclass
from pathlib import Path

from redline.runners.job import AgentTask, Begun
from redline.runners.protocol import Channel, Received


@dataclass
class InPlaceOfASearch(AgentTask):
    """A task with the same fields as a search's."""

    url: str
    data: Path
    search: str
    log: Path
    code: bool = True
    limits: object = None


class Waits(InPlaceOfASearch):
    """Waits until the caller closes the channel."""

    def run(self, call: Received) -> None:
        call.note(Begun(os.getpid()))
        try:
            call.channel.receive()
        except EOFError:
            return


class Fails(InPlaceOfASearch):
    """Fails with an exit code and a message in its log."""

    def run(self, call: Received) -> int:
        with open(self.log, "a") as log:
            print(f"the disk of {self.search} is full", file=log)
        call.note(Begun(os.getpid()))
        return 7


def run_alone(task, connection):
    task.run(Received(Channel(connection), 1, "task", (task,)))
