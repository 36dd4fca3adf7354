"""What a host agent does in the place of a search."""

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from redline.runners.job import AgentTask, Begun


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

    def run(self, client: Connection) -> None:
        client.send(Begun(os.getpid()))
        try:
            client.recv()
        except EOFError:
            return


class Fails(InPlaceOfASearch):
    """With a code, and words in its log."""

    def run(self, client: Connection) -> None:
        with open(self.log, "a") as log:
            print(f"the disk of {self.search} is full", file=log)
        client.send(Begun(os.getpid()))
        client.send(7)
