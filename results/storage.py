"""Optuna storages of a ledger: a journal file that survives kill -9 and a full disk, a database, or memory."""

import contextlib
import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.storages.journal import JournalFileBackend

from ..base._optuna import LOCK_FILE_SUFFIX, RENAME_FILE_SUFFIX, get_lock_file, study_ids
from ..base.errors import MissingDependency, StudyError, unknown
from ..base.interrupts import late_interrupts
from ..base.writing import Reserve, open_plain, write_all

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage


def distribution(values: Sequence[Any]) -> "BaseDistribution":
    """The narrowest Optuna distribution that holds all `values`.

    Integers become `IntDistribution` and other numbers `FloatDistribution`: logarithmic where each value is
    the same multiple of the one before, stepped where they are evenly spaced. All else is categorical.

    Raises:
        ValueError: `values` is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    # Optuna keeps a number as a float: past 2 ** 53 that is another number.
    numeric = all(
        isinstance(each, (int, float)) and not isinstance(each, bool) and abs(each) <= 2**53 for each in values
    )
    if not values or not numeric:
        return CategoricalDistribution(tuple(values))
    ordered = sorted(set(values))
    low, high = ordered[0], ordered[-1]
    log = low > 0 and len(ordered) > 2 and _geometric(ordered)
    if all(isinstance(each, int) for each in ordered):
        step = 1 if log or low == high else math.gcd(*(each - low for each in ordered[1:]))
        return IntDistribution(low, high, log=log, step=step)
    return FloatDistribution(low, high, log=log, step=None if log else _even_step(ordered))


def _geometric(ordered: Sequence[float]) -> bool:
    ratio = ordered[1] / ordered[0]
    return all(math.isclose(b / a, ratio, rel_tol=1e-9) for a, b in pairwise(ordered))


def _even_step(ordered: Sequence[float]) -> float | None:
    # Optuna counts steps in decimals: 0, 0.1, 0.2 are even, thirds are not.
    if len(ordered) < 2:
        return None
    exact = [Decimal(repr(each)) for each in ordered]
    first, step = exact[0], exact[1] - exact[0]
    if (exact[-1] - first) / step > 10**6:
        return None
    # The difference of two floats may have more digits than a float.
    even = Decimal(repr(float(step))) == step and all((each - first) % step == 0 for each in exact)
    return float(step) if even else None


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Journal(JournalFileBackend):
    """Optuna's journal file with whole records only.

    Outcomes (`together`) are forced to the disk; other records survive the process at once and a power cut as
    soon as an outcome follows them. Losing the announcement of a trial loses nothing: it is proposed again.
    Appending goes through Optuna's own lock, so that its dashboard can write notes meanwhile.

    Args:
        path: the file; created if it is not there.
        reserve: the space that `together` may fall back on.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        # Optuna's lock is a symbolic link to this path; a relative one would dangle, and then waiting for it
        # never ends (JournalFileSymlinkLock.acquire).
        super().__init__(str(path.absolute()))
        self._reserve = reserve
        self._together: list[dict[str, Any]] | None = None
        self.trouble: OSError | None = None
        """Why the reserve had to be used; None while all is well."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, records are collected; they are written in one go at the end, using the reserve if need be,
        and are on the disk when this returns.

        Raises:
            OSError: they cannot be written even so; the file is as it was.
        """
        self._together = []
        try:
            yield
            records = self._together
        finally:
            self._together = None
        try:
            self._append(records, durable=True)
        except OSError as error:
            if not (self._reserve and self._reserve.release()):
                raise
            self._append(records, durable=True)
            self.trouble = error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends records, all of them or none.

        Raises:
            OSError: they cannot be written; the file is as it was.
        """
        if self._together is None:
            self._append(logs)
        else:
            self._together += logs

    def recover(self) -> None:
        """Takes the reserve's space again after it was used.

        Raises:
            OSError: there is still no space.
        """
        if self.trouble is not None and self._reserve is not None:
            self._reserve.fill()
            self.trouble = None

    def close(self) -> None:
        """Gives the reserve's space back. May be called twice."""
        if self._reserve is not None:
            self._reserve.release()

    def _append(self, records: list[dict[str, Any]], *, durable: bool = False) -> None:
        data = b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in records)
        # An interrupt between the steps by which Optuna gives its lock back would be an error of its own there.
        with late_interrupts(), get_lock_file(self._lock), open_plain(Path(self._file_path), _APPEND) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                write_all(file, data)
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


def repair(path: Path) -> int:
    """Cuts off what a killed process or a power cut left of an unfinished record; returns the bytes cut.

    Only for the process that holds the folder's lock. A complete record is never touched.

    Raises:
        OSError: the file cannot be read or written.
    """
    with open_plain(path, os.O_RDWR) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = _line_start(file, end)
            file.seek(start)
            line = file.read(end - start)
            # A file system may fill with zeros what was not written when the power went.
            if line.endswith(b"\n") and b"\0" not in line:
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


def _line_start(file: Any, end: int, chunk: int = 64 * 1024) -> int:
    """Offset at which the line starts whose last byte is at `end - 1`."""
    position = end - 1
    while position > 0:
        step = min(chunk, position)
        file.seek(position - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return position - step + found + 1
        position -= step
    return 0


def break_stale_lock(path: Path, patience_s: float = 0.3) -> bool:
    """Removes the lock a killed process left beside the journal; whether there was one.

    Optuna itself would wait 30 s for it. Only for the process that holds the folder's lock: then a lock that
    does not change hands in `patience_s` belongs to nobody (Optuna's dashboard holds it for milliseconds).
    """
    lock = path.with_name(path.name + LOCK_FILE_SUFFIX)
    for half_released in path.parent.glob(f"{lock.name}*{RENAME_FILE_SUFFIX}"):
        half_released.unlink(missing_ok=True)
    found = _identity(lock)
    if found is None:
        return False
    time.sleep(patience_s)
    if _identity(lock) != found:
        return False
    lock.unlink(missing_ok=True)
    return True


def _identity(lock: Path) -> tuple[int, int] | None:
    try:
        stat = lock.lstat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_ctime_ns


def damage(path: Path, error: Exception) -> StudyError:
    """The error for a journal Optuna cannot read, naming its first bad line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                whole = isinstance(json.loads(line), dict)
            except ValueError:
                whole = False
            if not whole:
                return StudyError(
                    f"line {number} of '{path}' is not a record of a study: {line[:60]!r}; "
                    "restore the file, delete that line, or start with another --out"
                )
    return StudyError(
        f"'{path}' is not a journal that Optuna can read ({type(error).__name__}: {error}); "
        "restore it or start with another --out"
    )


RESERVE = ".reserve"
"""Name of the file that keeps space back, beside the journal."""


def is_path(source: Any) -> bool:
    """Whether a source is the path of a journal file, not a URL, a storage or None."""
    return isinstance(source, Path) or (isinstance(source, str) and "://" not in source)


def words(source: Any) -> str:
    """A source as messages name it."""
    if source is None:
        return "memory"
    if not isinstance(source, (str, Path)):
        return f"the given {type(source).__name__}"
    return f"'{source if is_path(source) else without_password(str(source))}'"


def without_password(url: str) -> str:
    """The URL of a storage as it may be written down and shown."""
    return re.sub(r"(?<=://)([^:@/]*):.*@", r"\1@", url)


def open_study(storage: "BaseStorage", where: str, name: str, metadata: Mapping[str, Any], exist_ok: bool) -> int:
    """The id of the study `name`, created or completed with its metadata.

    Raises:
        StudyError: it has other metadata, or is there at all unless `exist_ok`.
    """
    import optuna

    stored: dict[str, Any] = {}
    study_id = study_ids(storage).get(name)
    if study_id is None:
        study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name)
    elif not exist_ok:
        raise StudyError(f"{where} already holds a study '{name}'; continue it with --resume or give another --out")
    else:
        stored = storage.get_study_user_attrs(study_id)
    other = [
        f"{key}: was {stored[key]}, now {value}"
        for key, value in metadata.items()
        if key in stored and stored[key] != value
    ]
    if other:
        raise StudyError(f"the study '{name}' in {where} is another one: {'; '.join(other)}")
    # A process killed while it created the study has left some of these out.
    for key in [each for each in metadata if each not in stored]:
        storage.set_study_user_attr(study_id, key, metadata[key])
    study = optuna.Study(name, storage)
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["throughput"])
    return study_id


def open_storage(source: Any, *, mend: bool) -> "tuple[BaseStorage, Journal | None]":
    """The Optuna storage of a source (see `Ledger.open`), and its journal if it is a file of ours.

    Args:
        source: a path, a URL, a storage, or None for memory.
        mend: whether to mend a journal file first and to keep back space for its last record. Without, it is to be
            read: a database in a file must be there, and is opened so that it cannot change.

    Raises:
        StudyError: the file is damaged, or the URL leads nowhere.
        OSError: the file cannot be written.
        ImportError: the storage needs a package that is not installed.
    """
    import optuna

    if source is None:
        return optuna.storages.InMemoryStorage(), None
    if not isinstance(source, (str, Path)):
        return source, None
    if not is_path(source):
        return _remote(str(source), read_only=not mend), None

    path = Path(source).absolute()
    reserve = None
    if mend:
        if path.is_symlink():
            raise StudyError(f"'{path}' is a symbolic link, and links in a run's folder are not followed; remove it")
        if path.exists():
            repair(path)
            break_stale_lock(path)
        reserve = Reserve(path.with_name(RESERVE))
        reserve.fill()
    journal = Journal(path, reserve)
    try:
        return optuna.storages.JournalStorage(journal), journal
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:  # how Optuna meets a damaged record
        journal.close()
        raise damage(path, error) from error


DATABASES = ("sqlite", "postgresql", "mysql", "mariadb", "mssql", "oracle")
"""The kinds of URLs that are opened: Optuna keeps studies there as columns and JSON."""


def check_url(url: str) -> None:
    """Refuses what must not be opened.

    Raises:
        StudyError: the URL is of another kind than `DATABASES`.
    """
    kind = url.partition("://")[0].partition("+")[0].lower()
    if kind.startswith(("redis", "valkey", "unix")):
        raise StudyError(
            f"the storage {words(url)} is not opened: Optuna unpickles what a Redis server sends, which runs whatever "
            f"code somebody put there; use a database ({', '.join(DATABASES[:3])}), or the study.log in --out"
        )
    if kind not in DATABASES:
        raise StudyError(f"cannot open the storage {words(url)}: {unknown('kind of database', kind, DATABASES)}")


def _remote(url: str, *, read_only: bool) -> "BaseStorage":
    import optuna

    check_url(url)
    import sqlalchemy
    import sqlalchemy.exc

    try:
        made = sqlalchemy.engine.make_url(url)
        file = made.database if made.get_backend_name() == "sqlite" else None
        if read_only and file and file != ":memory:" and not file.startswith("file:"):
            path = Path(file).absolute()
            if not path.is_file():
                raise StudyError(f"cannot open the storage {words(url)}: there is no file '{file}'")
            query = {**made.query, "mode": "ro", "uri": "true"}
            url = made.set(database=path.as_uri().replace("file://", "file:", 1), query=query).render_as_string(False)
        return optuna.storages.RDBStorage(url, skip_table_creation=read_only)
    except (
        sqlalchemy.exc.SQLAlchemyError,
        RuntimeError,
        AssertionError,
    ) as error:  # tables of another version, or none
        reason = next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)
        raise StudyError(f"cannot open the storage {words(url)}: {reason}") from error


@contextlib.contextmanager
def contained(where: str) -> Iterator[None]:
    """Turns the storage's failures into ours."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except ImportError as error:
        raise MissingDependency(f"the storage {where} needs a package that is not installed: {error}") from error
    except OSError as error:
        raise StudyError(f"cannot write {where}: {error.strerror or error}") from error
    except OptunaError as error:
        raise StudyError(f"the storage {where} failed: {error}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from announcing on stderr that it creates a study."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
