"""What lies on disk of a run: the table, and the sidecars beside it as far as they can be read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import StudyError
from ...base.reading import path_of, read_inside
from ...knobs.lossy import lossy_of
from ...results import request, schema
from ...results.best import confirmed, read as read_best
from ...results.measurement import Trial
from ...results.names import BEST, LEDGER, RUN, TABLE, holds_run
from ...results.table import LARGEST_TABLE, parse, sane, trials_of
from . import state


@dataclass(kw_only=True, slots=True)
class Source:
    """A run as its files tell it. Nothing is locked or written, and optuna is not needed."""

    folder: Path
    """Where the table lies; logs are looked for in here and nowhere else."""
    table: str
    """Name of the table in it."""
    columns: dict[str, list[Any]]
    """The table's cells by column, in the order of trials; None for an empty one."""
    trials: list[Trial]
    """The same as trials, the winner and the default with their re-measurements."""
    request: dict[str, Any] | None
    """The contents of run.yaml; None without one."""
    best: dict[str, Any] | None
    """The contents of best.yaml; None without one, or if it tells of other trials than the table."""
    state: str
    """See `state`."""
    problems: list[str] = field(default_factory=list)
    """What is missing or damaged, in words."""

    @property
    def name(self) -> str:
        """What was tuned, or what the file is called."""
        asked = (self.request or {}).get("asked", {})
        for key in ("model", "name"):
            if isinstance(asked.get(key), str) and asked[key]:
                return asked[key]
        if self.table == TABLE:
            return self.folder.resolve().name or TABLE
        return Path(self.table).stem

    @property
    def simulated(self) -> bool:
        """Whether nothing was run: all numbers are predictions."""
        return bool((self.request or {}).get("asked", {}).get("simulated"))

    @property
    def emulated(self) -> bool:
        """True if some ranks of each trial ran on one device, and communication was priced."""
        return bool((self.request or {}).get("asked", {}).get("emulated"))

    @classmethod
    def unreadable(cls, folder: Path, why: str) -> "Source":
        """A run of which nothing can be read, as one without trials."""
        columns, _ = parse(_NOTHING, TABLE)
        return cls(
            folder=folder, table=TABLE, columns=columns, trials=[], request=None, best=None, state=state.STOPPED,
            problems=[why],
        )  # fmt: skip

    @classmethod
    def read(cls, path: str | Path, *, lenient: bool = False) -> "Source":
        """The run in a folder, or the table in a CSV file of any name (then without sidecars).

        Args:
            path: the folder or file.
            lenient: a table that is missing or lacks needed columns, and a run.yaml of another format, are
                problems of an empty run instead of errors.

        Raises:
            StudyError: there is no run, its table lacks a needed column, or it has another format.
        """
        path = path_of(path)
        if path.is_dir():
            folder, name = path, TABLE
        elif path.exists():
            folder, name = path.parent, path.name
        else:
            raise StudyError(f"there is no '{path}'; give the --out of a run, or a table of trials (CSV)")
        alone = path != folder and (name != TABLE or not holds_run(folder))
        if not alone and not holds_run(folder):
            raise StudyError(f"'{path}' holds no run: neither {RUN} nor {TABLE} is there{_nearby(path)}")
        problems: list[str] = []
        asked = None if alone else _asked(folder, problems, lenient or path != folder)
        columns = _table(folder, name, asked is not None, problems, lenient)
        trials = trials_of(columns, lossy=lossy_of(asked))
        best = None if alone else read_best(folder, problems)
        running = not alone and state.is_running(folder)
        judged = confirmed(trials, best)
        if best is not None and judged is None:
            if not running:
                problems.append(f"{BEST} tells of other trials than {TABLE}; the winner shown is the table's")
            best = None
        trials = trials if judged is None else judged
        if running:
            now = state.RUNNING
        elif asked is None:
            now = state.TABLE_ONLY
        elif best is None:
            now = state.STOPPED
        else:
            now = state.FINISHED if best.get("best") is not None else state.NOTHING
        return cls(
            folder=folder, table=name, columns=columns, trials=trials, request=asked, best=best, state=now,
            problems=problems,
        )  # fmt: skip


_NOTHING = b"trial,status,throughput\n"


def _table(folder: Path, name: str, may_be_missing: bool, problems: list[str], lenient: bool) -> dict[str, list[Any]]:
    try:
        data = read_inside(folder.resolve(), name, at_most=LARGEST_TABLE)
    except FileNotFoundError:
        if not (may_be_missing or lenient):
            raise StudyError(
                f"'{folder}' has no {name}, which is what a report is made from; it is written with the first "
                "trial, and `redline tune --resume` writes it anew"
            ) from None
        problems.append(f"{name} is not there (yet)")
        return parse(_NOTHING, name)[0]
    except OSError as error:
        if not lenient:
            raise StudyError(f"cannot read '{folder / name}': {error.strerror or error}") from error
        problems.append(f"{name} cannot be read: {error.strerror or error}")
        return parse(_NOTHING, name)[0]
    try:
        columns, found = parse(data, name)
    except StudyError as error:
        if not lenient:
            raise StudyError(str(error).replace(f"'{name}'", f"'{folder / name}'", 1)) from None
        problems.append(str(error))
        return parse(_NOTHING, name)[0]
    problems += found
    return sane(columns, problems)


def _asked(folder: Path, problems: list[str], lenient: bool) -> dict[str, Any] | None:
    document = schema.read_document(folder, RUN, problems)
    if document is None:
        if not (folder / RUN).exists() and (folder / LEDGER).exists():
            problems.append(f"{RUN} is missing: what was asked, the space and the environment are not known")
        return None
    try:
        document, faults = request.known_parts(document, folder / RUN)
    except StudyError as error:
        if lenient:
            problems.append(str(error))
            return None
        raise StudyError(
            f"{str(error).partition('; ')[0]}. For a page of the table alone: redline report {folder / TABLE}"
        ) from None
    problems += faults
    return document


def _nearby(path: Path) -> str:
    below = sorted(each.parent.name for name in (RUN, TABLE) for each in path.glob(f"*/{name}"))
    return f"; there is one in '{path / below[0]}'" if below else ""
