"""Optuna storages of a ledger: a journal file, a database, or memory."""

import contextlib
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import MissingDependency, StudyError, unknown
from ..base.interrupts import late_interrupts
from ..base.option import option
from ..base.reading import parse_json
from ..base.writing import open_plain

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileBackend

LOCK_S = 3
"""Time after which the lock of a killed process beside the journal is removed, s; the least that Optuna accepts."""
LARGEST_LEDGER = 32 << 20
"""Largest journal that is read, bytes."""


def is_path(source: Any) -> bool:
    """True if a source is the path of a journal file, not a URL, a storage or None."""
    return isinstance(source, Path) or (isinstance(source, str) and "://" not in source)


def words(source: Any) -> str:
    """Returns the name of a source for messages."""
    if source is None:
        return "memory"
    if not isinstance(source, (str, Path)):
        return f"the given {type(source).__name__}"
    return f"'{source if is_path(source) else without_password(str(source))}'"


def without_password(url: str) -> str:
    """Returns the URL of a storage without its password."""
    return re.sub(r"(?<=://)([^:@/]*):.*@", r"\1@", url)


def open_study(storage: "BaseStorage", origin: str, name: str, metadata: Mapping[str, Any], exist_ok: bool) -> int:
    """Returns the id of the study `name`, which is created, or completed with its metadata.

    Raises:
        StudyError: it has other metadata, or exists without `exist_ok`.
    """
    import optuna

    stored: dict[str, Any] = {}
    study_id = None
    with contextlib.suppress(KeyError):  # not by all studies of the storage, which may be thousands
        study_id = storage.get_study_id_from_name(name)
    if study_id is None:
        study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name)
    elif not exist_ok:
        raise StudyError(
            f"{origin} already contains a study '{name}'; continue it with {option('resume', True)} or give another "
            f"{option('out')}"
        )
    else:
        stored = storage.get_study_user_attrs(study_id)
    differences = [
        f"{key}: was {stored[key]}, now {value}"
        for key, value in metadata.items()
        if key in stored and stored[key] != value
    ]
    if differences:
        raise StudyError(f"the study '{name}' in {origin} belongs to another run: {'; '.join(differences)}")
    # A process killed while it created the study may not have stored all of these.
    for key in [attribute for attribute in metadata if attribute not in stored]:
        storage.set_study_user_attr(study_id, key, metadata[key])
    study = optuna.Study(name, storage)
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["throughput"])
    return study_id


def open_storage(source: Any, *, writable: bool) -> "BaseStorage":
    """Opens the Optuna storage of a source (see `Ledger.open`).

    Args:
        source: a path, a URL, a storage, or None for memory.
        writable: False to open a database for reading: its file must exist, and is opened read-only. A journal file is
            always opened for writing.

    Raises:
        StudyError: the file is damaged, or the URL is invalid.
        OSError: the file cannot be written.
        ImportError: the storage needs a package that is not installed.
    """
    import optuna

    if source is None:
        return optuna.storages.InMemoryStorage()
    if not isinstance(source, (str, Path)):
        return source
    if not is_path(source):
        return _remote(str(source), read_only=not writable)
    path = Path(source).absolute()
    if path.is_symlink():
        raise StudyError(f"'{path}' is a symbolic link, and links in a run's folder are not followed; remove it")
    if path.exists():
        read_journal(_whole_records(path), words(source))  # its error names a damaged line; Optuna's does not
    return optuna.storages.JournalStorage(_journal(path))


def read_journal(data: bytes, origin: str) -> "BaseStorage":
    """Returns the contents of a journal as a storage for reading. An unfinished last line is ignored, since another process
    may be writing it.

    Args:
        data: the journal's contents.
        origin: its name, for messages.

    Raises:
        StudyError: a line is not a record of a study.
    """
    from optuna.storages.journal import BaseJournalBackend, JournalStorage

    lines = data[: data.rfind(b"\n") + 1].splitlines()
    read = 0

    class Contents(BaseJournalBackend):
        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            nonlocal read
            for line in lines[log_number_from:]:
                read += 1
                yield parse_json(line)

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            raise NotImplementedError(f"{origin} was opened for reading only")

    try:
        return JournalStorage(Contents())
    except Exception as error:  # any that Optuna raises for an invalid record
        raise StudyError(
            f"line {read} of {origin} is not a record of a study ({type(error).__name__}: {error}): {lines[read - 1][:60]!r}; "
            f"restore the file, delete that line, or start with another {option('out')}"
        ) from error


def _whole_records(path: Path) -> bytes:
    """Returns a journal's contents, and removes a last record that a killed process left unfinished."""
    with open_plain(path, os.O_RDWR) as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            file.truncate(end)
    return data[:end]


def _journal(path: Path) -> "JournalFileBackend":
    """Returns Optuna's journal file, which every change is appended and synced to.

    Args:
        path: an absolute path: Optuna's lock is a link to it, and waiting for a link that dangles would never end.
    """
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            try:
                with late_interrupts():  # one while Optuna releases its lock would leave it behind
                    super().append_logs(logs)
            except OSError:
                _whole_records(path)  # a full disk may have taken a part of the last one
                raise

    return Journal(str(path), JournalFileSymlinkLock(str(path), grace_period=LOCK_S))


DATABASES = ("sqlite", "postgresql", "mysql", "mariadb", "mssql", "oracle")
"""Kinds of URLs that are opened. Optuna stores studies there as columns and JSON."""


def check_url(url: str) -> None:
    """Checks that a URL may be opened.

    Raises:
        StudyError: the URL is of another kind than `DATABASES`.
    """
    kind = url.partition("://")[0].partition("+")[0].lower()
    if kind.startswith(("redis", "valkey", "unix")):
        raise StudyError(
            f"the storage {words(url)} is not opened: Optuna unpickles data from a Redis server, which can run "
            f"arbitrary code; use a database ({', '.join(DATABASES[:3])}), or the study.log in {option('out')}"
        )
    if kind not in DATABASES:
        raise StudyError(f"cannot open the storage {words(url)}: {unknown('kind of database', kind, DATABASES)}")


CREATIONS, CREATION_S = 50, 0.1
"""Attempts to open a database whose tables another process creates, and the time between them, s."""


def _remote(url: str, *, read_only: bool) -> "BaseStorage":
    import optuna

    check_url(url)
    import sqlalchemy
    import sqlalchemy.exc

    try:
        parsed = sqlalchemy.engine.make_url(url)
        file = parsed.database if parsed.get_backend_name() == "sqlite" else None
        if read_only and file and file != ":memory:" and not file.startswith("file:"):
            path = Path(file).absolute()
            if not path.is_file():
                raise StudyError(f"cannot open the storage {words(url)}: there is no file '{file}'")
            query = {**parsed.query, "mode": "ro", "uri": "true"}
            url = parsed.set(database=path.as_uri().replace("file://", "file:", 1), query=query).render_as_string(False)
        if read_only:
            return optuna.storages.RDBStorage(url, skip_table_creation=True)
        for _ in range(CREATIONS):
            try:
                return optuna.storages.RDBStorage(url)
            except sqlalchemy.exc.DBAPIError as error:
                # Optuna creates the tables one by one and without a transaction, as another process may at the same time.
                created = re.search(r"already exists|database (?:table )?is locked", str(error))
                if not created and not isinstance(error, sqlalchemy.exc.IntegrityError):
                    raise
                time.sleep(CREATION_S)
        return optuna.storages.RDBStorage(url)
    except (
        sqlalchemy.exc.SQLAlchemyError,
        RuntimeError,
        AssertionError,
    ) as error:  # the tables are missing or of another version
        reason = next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)
        raise StudyError(f"cannot open the storage {words(url)}: {reason}") from error


@contextlib.contextmanager
def contained(origin: str) -> Iterator[None]:
    """Converts the storage's exceptions to redline's."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except ImportError as error:
        raise MissingDependency(f"the storage {origin} needs a package that is not installed: {error}") from error
    except OSError as error:
        raise StudyError(f"cannot write {origin}: {error.strerror or error}") from error
    except OptunaError as error:
        raise StudyError(f"the storage {origin} failed: {error}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from logging that it creates a study."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
