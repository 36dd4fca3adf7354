"""One server a database: a lock that the kernel or Postgres releases when its process is gone, however that ends.

Of SQLite it is a lock on a file beside the database (flock), of Postgres a lock of a session (`pg_try_advisory_lock`). A
session can be lost while the server lives, as when Postgres restarts: then it takes the lock again, or ends where another
server was faster.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from ...base.errors import StudyError
from ...base.lock import FolderLock
from .connection import Database

LOOK_S = 2.0
"""How often it is looked whether the session still lives, s."""
_SERVER_LOCK = 0x7265646C696E67
_HOLDER = text(
    "SELECT a.application_name, a.client_addr::text FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = :high AND l.objid = :low"
)
_log = logging.getLogger("redline.server")


class Alone(contextlib.AbstractContextManager["Alone"]):
    """Holds a database for one server, until it is closed or its process is gone.

    Args:
        url: of the database.
        lost: called, in a thread, when another server has it.

    Raises:
        StudyError: another server has it (which one).
        StorageUnavailable: the database cannot be used.
    """

    def __init__(self, url: str, lost: Callable[[], None]) -> None:
        self._database = Database(url)
        self._lost = lost
        self._file: FolderLock | None = None
        self._session: Connection | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            if self._database.sqlite:
                path = _path_of(url)
                self._file = FolderLock(path.parent, f"{path.name}.server")
            else:
                self._session = self._database.read(lambda connection: self._taken())
                self._thread = threading.Thread(target=self._watch, daemon=True, name="alone")
                self._thread.start()
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Lets another server have the database."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.release()
        if self._session is not None:
            with contextlib.suppress(DBAPIError):  # a session that is gone holds nothing
                self._session.invalidate()
                self._session.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _taken(self) -> Connection:
        """A session that has the lock.

        Raises:
            StudyError: another has.
        """
        session = self._database.apart()
        try:
            session.execute(
                text("SELECT set_config('application_name', :name, false)"),
                {"name": f"redline serve, process {os.getpid()} on {socket.gethostname()}"[:63]},
            )
            if session.execute(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _SERVER_LOCK}).scalar():
                return session
            parts = {"high": _SERVER_LOCK >> 32, "low": _SERVER_LOCK & 0xFFFFFFFF}
            holder = session.execute(_HOLDER, parts).first()
            who = holder.application_name or holder.client_addr if holder is not None else "another server"
            raise StudyError(
                f"{self._database.words} is in use by {who}; end it, or give --standby to take over after it"
            )
        except BaseException:
            session.invalidate()
            session.close()
            raise

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                if self._session is not None:
                    self._session.execute(text("SELECT 1"))
                    continue
                self._session = self._taken()
                _log.warning("%s was away; this server has it again", self._database.words)
            except DBAPIError:  # it is away: nobody can work on it, and it is tried again
                if self._session is not None:
                    self._session.invalidate()
                    self._session.close()
                    self._session = None
            except StudyError as error:
                _log.error("this server ends: %s", error)
                self._lost()
                return


def _path_of(url: str) -> Path:
    """SQLite's file."""
    name = str(make_url(url).database)
    return Path(name.removeprefix("file:").partition("?")[0]).absolute()
