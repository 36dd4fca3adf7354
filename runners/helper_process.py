"""A process of redline's own beside this one: started with a connection, ended when that closes."""

import contextlib
import os
import socket
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ..base.reading import tail_inside
from ..base.scratch import Scratch
from ..frameworks.setup import MEASURED_WITH
from .process import kill_tree
from .unix_user import UnixUser

LAST_WORDS = 2000
"""Bytes of what it printed last that are told."""


class HelperProcess:
    """Runs `python -m MODULE FD FOLDER` in a session of its own: its end of a connection, and a folder that it removes
    when the connection closes, as whoever started it may have been killed.

    What it prints goes to a log in the folder: the connection is not a standard stream, so whatever is imported
    may print or read there.

    Args:
        module: what is run.
        kind: names its folder (see `Scratch`).
        user: whose process it is, and whose folder; None for this one's own.
    """

    def __init__(self, module: str, kind: str, *, user: UnixUser | None = None) -> None:
        self._scratch = Scratch(kind)
        self.folder = self._scratch.path
        """Its folder, gone when it is closed."""
        self.connection: Connection
        """This end of the connection."""
        self.connection, theirs = Pipe()
        quiet = MEASURED_WITH
        whose = {"env": {**quiet, **os.environ}} if user is None else user.popen(self.folder, **quiet)
        with theirs, open(self.folder / "log", "wb") as log:
            if user is not None:
                user.give(self.folder)
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **whose,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def send(self, what: Any) -> None:
        """Tells it something; what reads from it finds out if it has ended."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(what)

    def hang_up(self) -> None:
        """Closes the connection for both ends, also under threads that wait at it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def ended(self, within_s: float = 5.0) -> int:
        """Its exit code, where it is about to end; one that stays is killed with all it started."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kills it with all it started, stopped or not; its exit code."""
        if self.running:  # once it was reaped, its number may be another's
            kill_tree(self.pid)
        return self.process.wait()

    def close(self, within_s: float) -> None:
        """Ends it, killing it after so long, and removes its folder. May be called twice."""
        self.hang_up()
        self.ended(within_s)
        self._scratch.close()

    def with_last_words(self, what: str) -> str:
        """The message, and the end of what it printed."""
        words = ""
        with contextlib.suppress(OSError):  # its end takes the folder with it
            words = tail_inside(self.folder, "log", at_most=LAST_WORDS)[0].strip()
        return f"{what}\n{words}" if words else what
