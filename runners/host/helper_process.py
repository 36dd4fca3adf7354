"""A child process with a connection: it ends when the connection closes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from ...base.reading import tail_inside
from ...base.scratch import Scratch
from ...frameworks.export_input import MEASURED_WITH
from .process import kill_tree
from .protocol import hang_up

LAST_WORDS = 2000
"""Size of the end of its output that errors show, bytes."""


class HelperProcess:
    """Runs `python -m MODULE FD FOLDER` in its own session. FD is its end of a connection. FOLDER is removed by the
    process when the connection closes, since its parent may have been killed.

    Its output goes to a log in the folder. The connection is not a standard stream, so imported modules may print or
    read there.

    Args:
        module: module to run.
        kind: names its folder (see `Scratch`).
        environment: default values of its environment variables, besides `MEASURED_WITH`.
    """

    def __init__(self, module: str, kind: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._scratch = Scratch(kind)
        self.folder = self._scratch.path
        """Its folder, which `close` removes."""
        self.connection: Connection
        """This end of the connection."""
        self.connection, child_end = Pipe()
        with child_end, open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(child_end.fileno()), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
                env={**MEASURED_WITH, **(environment or {}), **os.environ},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """True if the process has not ended."""
        return self.process.poll() is None

    def ended(self, within_s: float = 5.0) -> int:
        """Waits for the end and returns the exit code. Kills the process and everything it started after `within_s`."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kills the process and everything it started, suspended or not, and returns its exit code."""
        if self.running:  # a reaped process's id may belong to another one
            kill_tree(self.pid)
        return self.process.wait()

    def close(self, within_s: float) -> None:
        """Ends the process, killing it after `within_s`, and removes its folder. May be called twice."""
        hang_up(self.connection)
        self.ended(within_s)
        self._scratch.close()

    def with_last_words(self, message: str) -> str:
        """Returns the message followed by the end of the process's output."""
        output = ""
        with contextlib.suppress(OSError):  # the process removes the folder when it ends
            output = tail_inside(self.folder, "log", at_most=LAST_WORDS)[0].strip()
        return f"{message}\n{output}" if output else message
