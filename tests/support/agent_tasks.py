"""What a host agent does in the place of a search."""

import os
from dataclasses import dataclass
from pathlib import Path

from redline.runners.job import AgentTask, Begun
from redline.runners.protocol import Channel, Received


@dataclass
class InPlaceOfASearch(AgentTask):
    """Of the same fields."""

    url: str
    data: Path
    search: str
    log: Path
    code: bool = True
    limits: object = None


class Waits(InPlaceOfASearch):
    """Until it is not needed any more."""

    def run(self, call: Received) -> None:
        call.note(Begun(os.getpid()))
        try:
            call.channel.receive()
        except EOFError:
            return


class Fails(InPlaceOfASearch):
    """With a code, and words in its log."""

    def run(self, call: Received) -> int:
        with open(self.log, "a") as log:
            print(f"the disk of {self.search} is full", file=log)
        call.note(Begun(os.getpid()))
        return 7


def run_alone(task, connection):
    """Runs a task in this process."""
    task.run(Received(Channel(connection), 1, "task", (task,)))
