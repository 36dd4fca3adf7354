"""A process that runs a search's dry runs as another Unix user, since they run code that a user submitted.

    python -m redline.service.code_process FD FOLDER

`CodeRunners` starts it (see `HelperProcess`) and calls it with assignments. It has neither the worker's token nor its
connection to the server, and only the files it is given. It replies in JSON, never in pickles, since the worker does
not trust it.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.scratch import remove
from ..runners.local import LocalRunner, SharedDevices
from ..runners.protocol import Channel, Received, receive_call, serve
from .records import Assignment
from .warm import WarmRunners
from .worker import run_dry_run


class CodeProcess:
    """Runs assignments on devices that are lent to it for each one."""

    def __init__(self, channel: Channel, folder: Path, devices: int) -> None:
        self._channel = channel
        self._warm = WarmRunners("local", devices, folder / "asked")
        self._running: dict[int, tuple[Assignment, Path]] = {}

    def serve(self) -> None:
        """Runs assignments until the worker closes the connection."""
        try:
            serve(self._channel, self._run, self._stop)
        finally:
            self._warm.close()

    def _run(self, call: Received) -> dict[str, Any]:
        """Returns the outcome of an assignment."""
        content, ids, logs = call.arguments[0], call.arguments[1], Path(call.arguments[2])
        assignment = Assignment(**content)
        log = logs / (assignment.payload["requests"][0]["log"] or "")
        self._running[call.number] = (assignment, log)
        # Only the devices lent for this dry run: the worker takes these back when it ends.
        lent = SharedDevices(ids, count=assignment.devices)
        try:
            with self._warm.runner(assignment) as runner:
                assert isinstance(runner, LocalRunner)
                return run_dry_run(runner.on(lent), assignment, logs)
        except UsageError as error:
            return {"refused": str(error)}
        finally:
            del self._running[call.number]

    def _stop(self, number: int) -> None:
        if (found := self._running.get(number)) is not None:
            self._warm.stop(*found)


def main() -> None:
    """Serves until the worker closes the connection."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    os.set_inheritable(connection.fileno(), False)
    channel = Channel(connection, plain=True)
    start = receive_call(channel)
    (devices,) = start.arguments
    start.done()
    CodeProcess(channel, folder, devices).serve()
    remove(folder)


if __name__ == "__main__":
    main()
