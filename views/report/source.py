"""The files of a run: the table, and the files beside it where they can be read."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import StudyError
from ...base.reading import path_of, read_inside
from ...knobs.lossy import lossy_of
from ...results import request, schema
from ...results.best import confirmed, is_plan, load, read as read_best
from ...results.columns import header, line, row
from ...results.measurement import Trial
from ...results.names import BEST, LEDGER, RUN, STOPPED, TABLE, TABLE_ONLY, holds_run, is_running, run_of, state_of
from ...results.run import instead_of_run
from ...results.table import LARGEST_TABLE, parse, trials_of


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """The contents of the files of a run. Nothing is locked or written, and optuna is not needed."""

    folder: Path
    """The folder of the table; logs are read from nowhere else."""
    table: str
    """File name of the table."""
    columns: dict[str, list[Any]]
    """Cells of the table by column, in the order of trials; None for an empty cell."""
    trials: list[Trial]
    """The rows as trials, the winner and the default with their repeated measurements."""
    request: dict[str, Any] | None
    """The contents of run.yaml; None without one."""
    best: dict[str, Any] | None
    """The contents of best.yaml; None without one, or if it does not agree with the table."""
    state: str
    """See `results.names`."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of missing or damaged files."""

    @property
    def name(self) -> str:
        """The tuned model or the name of the file."""
        requested = (self.request or {}).get("asked", {})
        for key in ("model", "name"):
            if isinstance(requested.get(key), str) and requested[key]:
                return requested[key]
        if self.table == TABLE:
            return self.folder.resolve().name or TABLE
        return Path(self.table).stem

    @property
    def simulated(self) -> bool:
        """True if all numbers are predictions."""
        return bool((self.request or {}).get("asked", {}).get("simulated"))

    @property
    def emulated(self) -> bool:
        """True if some ranks of each trial ran on one device, and communication was priced."""
        return bool((self.request or {}).get("asked", {}).get("emulated"))

    @classmethod
    def unreadable(cls, folder: Path, reason: str) -> "RunFiles":
        """Returns a run that cannot be read, as one without trials."""
        return cls(
            folder=folder, table=TABLE, columns=parse(_NOTHING, TABLE), trials=[], request=None, best=None, state=STOPPED,
            problems=[reason],
        )  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> "RunFiles":
        """Returns the run in a folder, or the table in a CSV file of any name (then without the other files).

        Raises:
            StudyError: there is no run, its table is invalid, or it has another format.
        """
        path = run_of(path_of(path))
        if is_plan(path):
            return cls._of_plan(path)
        if path.is_dir():
            folder, name = path, TABLE
        elif path.exists():
            folder, name = path.parent, path.name
        else:
            raise StudyError(f"'{path}' does not exist; give the --out of a run, or a table of trials (CSV)")
        alone = path != folder and (name != TABLE or not holds_run(folder))
        if not alone and not holds_run(folder):
            raise StudyError(f"'{path}' contains no run: neither {RUN} nor {TABLE} is there{instead_of_run(path)}")
        problems: list[str] = []
        request_document = None if alone else _request_of(folder, problems, path != folder)
        columns = _table(folder, name, request_document is not None, problems)
        trials = trials_of(columns, lossy=lossy_of(request_document))
        best = None if alone else read_best(folder, problems)
        running = not alone and is_running(folder)
        judged = confirmed(trials, best)
        if best is not None and judged is None:
            if not running:
                problems.append(f"{BEST} does not agree with {TABLE}; the winner shown is that of the table")
            best = None
        trials = trials if judged is None else judged
        current = state_of(running, best) if running or request_document is not None else TABLE_ONLY
        return cls(
            folder=folder, table=name, columns=columns, trials=trials, request=request_document, best=best, state=current,
            problems=problems,
        )  # fmt: skip

    @classmethod
    def _of_plan(cls, path: Path) -> "RunFiles":
        """Returns a best.yaml outside its run, or a plan, as a run of one trial."""
        plan = load(path)
        knobs = tuple(plan.trial.config)
        columns = parse(f"{line(header(knobs))}{row(plan.trial, knobs)}".encode(), path.name)
        return cls(
            folder=path.parent, table=path.name, columns=columns, trials=[plan.trial], request=dict(plan.document), best=None,
            state=TABLE_ONLY,
        )  # fmt: skip


_NOTHING = b"trial,status,throughput\n"


def _table(folder: Path, name: str, may_be_missing: bool, problems: list[str]) -> dict[str, list[Any]]:
    try:
        data = read_inside(folder.resolve(), name, at_most=LARGEST_TABLE)
    except FileNotFoundError:
        if not may_be_missing:
            raise StudyError(
                f"'{folder}' has no {name}, which a report needs; it is written with the first "
                "trial, and `redline tune --resume` writes it again"
            ) from None
        problems.append(f"{name} does not exist (yet)")
        data = _NOTHING
    except OSError as error:
        raise StudyError(f"cannot read '{folder / name}': {error.strerror or error}") from error
    return {column: [_finite(cell) for cell in cells] for column, cells in parse(data, folder / name).items()}


def _finite(cell: Any) -> Any:
    """Returns None for a number that is not finite, such as the loss of a wrong trial."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _request_of(folder: Path, problems: list[str], table_alone: bool) -> dict[str, Any] | None:
    document = schema.read_document(folder, RUN, problems)
    if document is None:
        if not (folder / RUN).exists() and (folder / LEDGER).exists():
            problems.append(f"{RUN} is missing: the request, the space and the environment are unknown")
        return None
    try:
        document, faults = request.known_parts(document, folder / RUN)
    except StudyError as error:
        if table_alone:
            problems.append(str(error))
            return None
        raise StudyError(
            f"{str(error).partition('; ')[0]}. For a report of the table alone: redline report {folder / TABLE}"
        ) from None
    problems += faults
    return document
