"""A process that runs a search's dry runs as another Unix user: code of whoever submitted it, and all that it starts.

    python -m redline.service.code_process FD FOLDER

Started by `CodeRunners` (see `HelperProcess`), which tells it what to run. It has nothing of the worker's: no token, no
connection to the server, no files but those it is given. Its answers are JSON and never a pickle, as who runs here is not
trusted there.
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
    """Runs what it is told to, on devices that it is lent meanwhile.

    Args:
        connection: to the worker.
        folder: its own.
        devices: of the worker.
    """

    def __init__(self, connection: Connection, folder: Path, devices: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._warm = WarmRunners("local", devices, folder / "asked")
        assert self._warm.shared is not None, "the devices of this host are shared"
        self._shared = self._warm.shared
        self._shared.take(devices)  # it has none of its own
        self._running: dict[int, tuple[Assignment, Path]] = {}

    def serve(self) -> None:
        """Runs what it is told until the worker hangs up."""
        try:
            while True:
                said = json.loads(self._connection.recv_bytes())
                if "stop" in said:
                    if (found := self._running.get(said["stop"])) is not None:
                        self._warm.stop(*found)
                else:
                    threading.Thread(target=self._do, args=(said,), daemon=True).start()
        except (EOFError, OSError):  # it hung up
            return
        finally:
            self._warm.close()

    def _do(self, said: dict[str, Any]) -> None:
        number, logs = said["number"], Path(said["logs"])
        assignment = Assignment(**said["assignment"])
        shared, ids = self._shared, said["ids"]
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
    """Serves until the worker hangs up."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    os.set_inheritable(connection.fileno(), False)
    devices = json.loads(connection.recv_bytes())["devices"]
    CodeProcess(connection, folder, devices).serve()
    remove(folder)


if __name__ == "__main__":
    main()
