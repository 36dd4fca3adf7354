"""The service's database, SQLite or Postgres: one server's lock on it, migrations, and transactions with retries.

The kernel or Postgres releases the lock when its process is gone. On SQLite it is a lock on a file beside the database
(flock), on Postgres a lock of a session (`pg_try_advisory_lock`). A session can be lost while the server lives, for
example when Postgres restarts: the server then takes the lock again, or ends if another server was faster.

SQLite uses a write-ahead log (WAL) and begins writing transactions with BEGIN IMMEDIATE: a transaction that reads
first and writes later would fail if another one had written in between. Writers of one process queue at a lock,
because SQLite waits by sleeping and in no order. On Postgres, transactions lock the rows they change
(`with_for_update`).
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    StatementError,
    TimeoutError as NoConnection,
)

from ...base.errors import MissingDependency, StorageAhead, StorageUnavailable, StudyError, UsageError, unknown
from ...base.lock import FolderLock
from ...results.storage import without_password
from ..tables import VERSIONS

INSTEAD = "stop it first"
"""What to do about another server on the same data."""
BUSY_S = 5.0
"""How long a transaction waits for another's lock, s."""
PATIENCE_S = 10.0
"""How long an unreachable or restarting database is retried, s."""
CONFLICTS = 5
"""How often a transaction is repeated after a conflict with another one."""
KINDS = ("sqlite", "postgresql")

T = TypeVar("T")

_CONFLICTS = ("40001", "40P01")
"""Postgres codes of transactions that must be repeated
(https://www.postgresql.org/docs/current/errcodes-appendix.html).
"""
_NO_SUCH = ("42P01", "42703")
"""Postgres codes for a missing table or column."""


class Database:
    """A database, by its URL.

    Args:
        url: `sqlite:///FILE` or `postgresql://...`.
        patience_s: how long it is retried while it cannot be reached, s.

    Raises:
        UsageError: the URL is of another kind, or in memory.
        MissingDependency: the driver of Postgres is not installed.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        parsed = _checked(url)
        self.words = f"the database '{without_password(url)}'"
        """The database's name in messages."""
        self.sqlite = parsed.get_backend_name() == "sqlite"
        self.file = Path(str(parsed.database))
        """The file of SQLite."""
        self._patience_s = patience_s
        self._turn = threading.Lock()
        try:
            self._reader = _engine(parsed)
        except ImportError as error:
            raise MissingDependency(f"{self.words} needs a driver: pip install 'redline[service]' ({error})") from error
        self._writer = self._reader.execution_options(redline_begin="BEGIN IMMEDIATE")

    def read(self, body: Callable[[Connection], T]) -> T:
        """Returns the result of `body`, which reads in one transaction.

        Raises:
            StorageUnavailable: the database cannot be used. The message states why.
        """
        return self._run(self._reader, body)

    def write(self, body: Callable[[Connection], T]) -> T:
        """Returns the result of `body`, whose changes are made in one transaction.

        `body` may run again if it is unknown whether it was committed: it must be idempotent.

        Raises:
            StorageUnavailable: the database cannot be used. The message states why.
        """
        if not self.sqlite:
            return self._run(self._writer, body)
        start = time.monotonic()
        if not self._turn.acquire(timeout=self._patience_s):
            raise StorageUnavailable(f"{self.words} is locked, and other writers wait for it")
        try:
            return self._run(self._writer, body, time.monotonic() - start)
        finally:
            self._turn.release()

    def separate_connection(self) -> Connection:
        """Returns a connection of the caller's own, which must close it. Each statement is a transaction."""
        return self._reader.connect().execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Closes the connections."""
        self._reader.dispose()

    def _run(self, engine: Engine, body: Callable[[Connection], T], waited_s: float = 0.0) -> T:
        give_up, pause, conflicts = time.monotonic() + self._patience_s - waited_s, 0.02, 0
        while True:
            try:
                with engine.begin() as connection:
                    return body(connection)
            except DBAPIError as error:
                # Another transaction may have just inserted the same row.
                code, conflict = _code(error), isinstance(error, IntegrityError)
                conflicts += conflict or code in _CONFLICTS
                if not (conflict or _passes(error, code)) or conflicts > CONFLICTS or time.monotonic() > give_up:
                    raise self._unavailable(error, code) from error
            except NoConnection as error:
                raise StorageUnavailable(f"{self.words} is busy: all connections to it are in use") from error
            except (StatementError, OverflowError) as error:  # a value that no column can hold
                raise UsageError(_not_stored(error)) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _unavailable(self, error: DBAPIError, code: str) -> Exception:
        if isinstance(error, (DataError, InterfaceError)) and not error.connection_invalidated:
            return UsageError(_not_stored(error))  # caused by the values, not by the database
        other_tables = code in _NO_SUCH or "no such table" in str(error.orig) or "no such column" in str(error.orig)
        problem = "has other tables than this version of redline expects" if other_tables else "cannot be used"
        return StorageUnavailable(f"{self.words} {problem}: {_first_line(error)}")


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UsageError(
            f"the storage '{url}' is not a URL; give sqlite:///FILE or postgresql://USER@HOST/DATABASE"
        ) from error
    kind = parsed.get_backend_name()
    if kind not in KINDS:
        raise UsageError(f"the service cannot use '{without_password(url)}': {unknown('database', kind, KINDS)}")
    if kind == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise UsageError("a service's database must not be in memory; give sqlite:///FILE")
        if parsed.database.startswith("file:"):
            raise UsageError(f"the service cannot use the URI '{parsed.database}'; give sqlite:///FILE")
        parsed = parsed.set(database=str(Path(parsed.database).absolute()))
    elif parsed.drivername == kind:
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def _engine(url: URL) -> Engine:
    more: dict[str, Any]
    if url.get_backend_name() == "sqlite":
        more = {"connect_args": {"timeout": BUSY_S}}
    else:
        waits = f"-c lock_timeout={int(BUSY_S * 1000)} -c timezone=UTC"
        # A host that has vanished without a word is noticed in about ten seconds, not in a quarter of an hour.
        alive = {"keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
        given = {"connect_timeout": 5, "options": waits, "tcp_user_timeout": 10_000, **alive}
        more = {"connect_args": given, "isolation_level": "READ COMMITTED"}
    engine = create_engine(
        url,
        json_serializer=partial(json.dumps, allow_nan=False, separators=(",", ":")),
        pool_size=8,
        max_overflow=32,
        pool_timeout=BUSY_S,
        **more,
    )
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare(connection: Any, record: object) -> None:
    # Disables implicit transactions; see https://docs.sqlalchemy.org/en/21/dialects/sqlite.html, transactions.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("redline_begin", "BEGIN"))


def write_ahead(database: Database) -> None:
    """Switches a SQLite file to a write-ahead log (WAL), permanently, so that readers and a writer do not block each
    other.
    """
    if not database.sqlite:
        return
    with contextlib.suppress(OSError):  # SQLite reports the error when it opens the file
        database.file.touch(mode=0o600)  # the files that SQLite makes beside it get this mode too

    def switch(connection: Connection) -> None:
        connection.exec_driver_sql("COMMIT")  # a journal's mode changes outside of transactions
        connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar()
        connection.exec_driver_sql("BEGIN")

    database.read(switch)


def _code(error: DBAPIError) -> str:
    """Returns SQLite's name or Postgres's code of a database error; 08000 for a lost connection."""
    original: Any = error.orig
    name = getattr(original, "sqlite_errorname", None)
    if name:
        return str(name)
    code = getattr(original, "sqlstate", None) or ""
    lost = error.connection_invalidated or (not code and type(original).__name__ == "OperationalError")
    return str(code) or ("08000" if lost else "")


def _passes(error: DBAPIError, code: str) -> bool:
    """True if the error may be temporary."""
    return bool(error.connection_invalidated) or code in _CONFLICTS or code.startswith(("08", "57P", "SQLITE_BUSY"))


def _not_stored(error: Exception) -> str:
    return f"this cannot be stored: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    original = getattr(error, "orig", None) or error
    return next(iter(str(original).strip().splitlines()), type(original).__name__)


LOOK_S = 2.0
"""Interval between checks of the session, s."""
_SERVER_LOCK = 0x7265646C696E67  # "redline" in ASCII: the key of an advisory lock of Postgres
_HOLDER = text(
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = :high AND l.objid = :low"
)
_log = logging.getLogger("redline.server")


class DatabaseLock:
    """Locks a database for one server, until it is closed or its process is gone.

    Args:
        url: of the database.
        lost: called, in a thread, when another server has taken the lock.

    Raises:
        StudyError: another server has it. The message names the server.
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
                path = self._database.file
                self._file = FolderLock(path.parent, f"{path.name}.server", instead=INSTEAD)
            else:
                self._session = self._database.read(lambda connection: self._locked_session())
                self._thread = threading.Thread(target=self._watch, daemon=True, name="alone")
                self._thread.start()
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Releases the database."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.release()
        if self._session is not None:
            with contextlib.suppress(DBAPIError):  # a lost session has no lock to release
                # At once: Postgres ends a session some time after its connection is closed.
                self._session.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _SERVER_LOCK})
                self._session.invalidate()
                self._session.close()
        self._database.close()

    def _locked_session(self) -> Connection:
        """Returns a session that has the lock.

        Raises:
            StudyError: another server has it.
        """
        session = self._database.separate_connection()
        try:
            session.execute(
                text("SELECT set_config('application_name', :name, false)"),
                {"name": f"redline serve, process {os.getpid()} on {socket.gethostname()}"[:63]},
            )
            if session.execute(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _SERVER_LOCK}).scalar():
                return session
            parts = {"high": _SERVER_LOCK >> 32, "low": _SERVER_LOCK & 0xFFFFFFFF}
            owner = session.execute(_HOLDER, parts).scalar() or "another server"
            raise StudyError(f"{self._database.words} is in use by {owner}; {INSTEAD}")
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
                self._session = self._locked_session()
                _log.warning("%s was unreachable; this server has locked it again", self._database.words)
            except DBAPIError:  # unreachable for every server: retried
                if self._session is not None:
                    self._session.invalidate()
                    self._session.close()
                    self._session = None
            except StudyError as error:
                _log.error("this server ends: %s", error)
                self._lost()
                return


SCRIPTS = Path(__file__).parents[1] / "migrations"
_MIGRATION_LOCK = 0x7265646C696E66
"""Lock of the process that migrates, on Postgres. SQLite has a single writer."""


def migrate(database: Database) -> None:
    """Brings the tables to the state that this version expects.

    Raises:
        StorageAhead: a later version has written them.
    """
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    revisions, head = {script.revision for script in scripts.walk_revisions()}, scripts.get_current_head()
    version = database.read(_version)
    if version is not None and version not in revisions:
        raise StorageAhead(
            f"{database.words} has version {version}, written by a later redline: this one supports versions up to {head}; "
            "install the later one, or give another --storage"
        )
    if version == head:
        return

    def upgrade(connection: Connection) -> None:
        from alembic import command

        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        config.attributes |= {"connection": connection, "version_table": VERSIONS}
        command.upgrade(config, "head")

    database.write(upgrade)


def _version(connection: Connection) -> str | None:
    """Returns the version of a database's tables; None if it has none."""
    from alembic.migration import MigrationContext

    return MigrationContext.configure(connection, opts={"version_table": VERSIONS}).get_current_revision()
