"""A process that runs a search's dry runs as another Unix user, since they run code that a user submitted.

    python -m redline.service.code_process FD FOLDER

`CodeRunners` starts it (see `HelperProcess`) and sends it assignments. It has neither the worker's token nor its
connection to the server, and only the files it is given. It answers in JSON, never in pickles, since the worker does
not trust it.
"""

import json
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError, UsageError
from ..base.scratch import remove
from .code_runners import send
from .records import Assignment
from .warm import WarmRunners
from .worker import tried


class CodeProcess:
    """Runs assignments on devices that are lent to it for each one.

    Args:
        connection: to the worker.
        folder: the process's own folder.
        devices: number of devices of the worker.
    """

    def __init__(self, connection: Connection, folder: Path, devices: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._warm = WarmRunners("local", devices, folder / "asked")
        assert self._warm.shared is not None, "the devices of this host are shared"
        self._shared = self._warm.shared
        self._shared.take(devices)  # it has no devices until some are lent
        self._running: dict[int, tuple[Assignment, Path]] = {}

    def serve(self) -> None:
        """Runs assignments until the worker closes the connection."""
        try:
            while True:
                message = json.loads(self._connection.recv_bytes())
                if "stop" in message:
                    if (found := self._running.get(message["stop"])) is not None:
                        self._warm.stop(*found)
                else:
                    threading.Thread(target=self._do, args=(message,), daemon=True).start()
        except (EOFError, OSError):  # the worker closed the connection
            return
        finally:
            self._warm.close()

    def _do(self, message: dict[str, Any]) -> None:
        number, logs = message["number"], Path(message["logs"])
        assignment = Assignment(**message["assignment"])
        shared, ids = self._shared, message["ids"]
        log = logs / (assignment.payload["requests"][0]["log"] or "")
        self._running[number] = (assignment, log)
        shared.give_back(ids, assignment.devices)
        try:
            with self._warm.runner(assignment) as runner:
                answer: dict[str, Any] = {"outcome": tried(runner, assignment, logs)}
        except UsageError as error:
            answer = {"outcome": {"refused": str(error)}}
        except RunnerError as error:
            answer = {"lost": str(error)}
        finally:
            shared.take(assignment.devices)
            del self._running[number]
        with self._sending:
            send(self._connection, {"number": number, **answer})


def main() -> None:
    """Serves until the worker closes the connection."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    os.set_inheritable(connection.fileno(), False)
    devices = json.loads(connection.recv_bytes())["devices"]
    CodeProcess(connection, folder, devices).serve()
    remove(folder)


if __name__ == "__main__":
    main()
