"""Where a ledger lies: a journal file, a database, or memory, each as an Optuna storage."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, StudyError
from .files import Reserve

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from .journal import Journal

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
    if is_path(source):
        return f"'{source}'"
    return f"'{without_password(source)}'"


def without_password(url: str) -> str:
    """The URL of a storage as it may be written down and shown."""
    return re.sub(r"(?<=://)([^:@/]*):.*@", r"\1@", url)


def open_study(
    storage: "BaseStorage", where: str, name: str, metadata: Mapping[str, Any], exist_ok: bool
) -> int:
    """The id of the study `name`, created or completed with its metadata.

    Raises:
        StudyError: it has other metadata, or is there at all unless `exist_ok`.
    """
    import optuna

    stored: dict[str, Any] = {}
    study_id = {study.study_name: study._study_id for study in storage.get_all_studies()}.get(name)
    if study_id is None:
        study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name)
    elif not exist_ok:
        raise StudyError(
            f"{where} already holds a study '{name}'; continue it with --resume or give another --out"
        )
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
        mend: whether to mend a journal file first and to keep back space for its last record.

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
        return _remote(str(source)), None
    from .journal import Journal, break_stale_lock, damage, repair

    path = Path(source).absolute()
    reserve = None
    if mend:
        if path.exists():
            repair(path)
            break_stale_lock(path)
        reserve = Reserve(path.with_name(RESERVE))
        reserve.fill()
    journal = Journal(path, reserve)
    try:
        return optuna.storages.JournalStorage(journal), journal
    except (ValueError, KeyError, TypeError, AssertionError) as error:  # how Optuna meets a damaged record
        journal.close()
        raise damage(path, error) from error


def _remote(url: str) -> "BaseStorage":
    import optuna

    if url.startswith("redis"):
        from optuna.storages.journal import JournalRedisBackend

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.storages.JournalStorage(JournalRedisBackend(url))
    import sqlalchemy.exc

    try:
        return optuna.storages.RDBStorage(url)
    except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:  # RuntimeError: tables of another version
        reason = str(error.orig if getattr(error, "orig", None) else error).splitlines()[0]
        raise StudyError(f"cannot open the storage {words(url)}: {reason}") from error


@contextlib.contextmanager
def contained(where: str) -> Iterator[None]:
    """Turns the storage's failures into ours."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except ImportError as error:
        raise MissingDependency(
            f"the storage {where} needs a package that is not installed: {error}"
        ) from error
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
