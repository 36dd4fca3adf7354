"""A run's folder: the files that a search writes to `--out`, how it is resumed, and how others read it."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.lock import FolderLock
from ..base.option import option
from ..base.reading import path_of, read_inside
from ..base.writing import cannot_write, make_folder, write_yaml
from ..knobs.lossy import lossy_of
from . import best, environment, request, table
from .ledger import Ledger
from .measurement import Measurement, Trial
from .names import (
    BEST,
    LEDGER,
    LOG,
    LOGS,
    PLAN,
    RUN,
    TABLE,
    holds_run,
    holds_training,
    is_running,
    run_of,
    state_of,
)
from .storage import LARGEST_LEDGER


class RunFolder:
    """The folder of a run that this process works on. It has the folder's lock, writes its files and stores its
    trials.

    Created by `RunFolder.open`; use `View` for reading. Thread-safe.
    """

    def __init__(
        self,
        path: Path,
        document: Mapping[str, Any],
        ledger: Ledger,
        rows: table.Table,
        lock: FolderLock,
        *,
        resumed: bool,
        notes: Sequence[str],
        warn: Callable[[str], None],
    ) -> None:
        self.path = path
        self.document = document
        """The contents of run.yaml."""
        self.ledger = ledger
        """The ledger of the trials. Write through this folder instead, so that trials.csv is updated."""
        self.resumed = resumed
        """True if the folder contained this run before."""
        self.notes = tuple(notes)
        """Notes for the user about a resumed run: changed versions, a changed sampler."""
        # Trials have no row until they end.
        self.start, self.attempt = ledger.start, ledger.attempt
        self.trials, self.pending = ledger.trials, ledger.pending
        self._rows = rows
        self._lock = lock
        self._warn = warn
        self._behind: str | None = None
        """Why the table could not be written; None if it was."""
        self._closed = False
        self._mutex = threading.RLock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        requested: Mapping[str, Any],
        *,
        knobs: Mapping[str, Sequence[Any] | None],
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        storage: str | None = None,
        resume: bool = False,
        warn: Callable[[str], None] = lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2),
    ) -> "RunFolder":
        """Starts a run in `path`, or resumes the one in it.

        Args:
            path: the folder; created if it does not exist. Other files in it are left alone.
            requested: the request for run.yaml. A resumed run must repeat the keys `request.BINDING`; changes of
                `request.INFORMATIVE` are noted; other keys are free.
            knobs: the values of each knob, in the order of their columns; None for a derived knob.
            make_config: makes a configuration from a mapping of its values.
            storage: URL of an Optuna storage for the ledger; None for `study.log` in the folder. It must be given
                again to resume, since a storage named in run.yaml is never opened automatically.
            resume: continue the run in the folder.
            warn: called with problems that do not end the run.

        Raises:
            StudyError: the folder or storage cannot be used (locked, full, read-only, damaged), contains a run without
                `resume` or none with it, or the request was different. Nothing in it is changed then.
        """
        path = path_of(path)
        created = make_folder(path)
        with contextlib.ExitStack() as undo:
            lock = FolderLock(path)
            undo.callback(lock.release)
            if created:
                undo.callback(_remove, path, ".lock")
            resumed = cls.resumable(path, requested, storage=storage, resume=resume)
            document, notes = (
                request.resume(path, requested, storage) if resumed else (request.begin(path, requested, storage), [])
            )
            if not resumed:
                undo.callback(_remove, path, RUN, LEDGER, TABLE, LOGS)
            try:
                if not resumed:
                    # Written before the ledger, so that a run killed in between can be resumed.
                    write_yaml(path / RUN, document)
                ledger = Ledger.open(
                    storage or path / LEDGER,
                    name=document["study"],
                    metadata={"run": document["run"]},
                    knobs=knobs,
                    make_config=make_config,
                    exist_ok=resumed,
                    lossy=lossy_of(document),
                )
                undo.callback(ledger.close)
                # Earlier trials may have knobs that the space no longer has.
                extra = {name: None for trial in ledger.trials() for name in trial.config if name not in knobs}
                rows = table.Table(path / TABLE, {**knobs, **extra})
                folder = cls(path, document, ledger, rows, lock, resumed=resumed, notes=notes, warn=warn)
                _make_logs(path)
                rows.write(ledger.trials())
                # Last, so that a run that could not be resumed is not recorded as resumed.
                if resumed:
                    write_yaml(path / RUN, document)
            except OSError as error:
                raise cannot_write(path, error) from error
            undo.pop_all()
        return folder

    @staticmethod
    def resumable(
        path: str | Path, requested: Mapping[str, Any], *, storage: str | None = None, resume: bool = False
    ) -> bool:
        """Returns True if `path` contains the run that `open` with these arguments would resume. Changes
        nothing.

        Raises:
            StudyError: it contains a run without `resume` or none with it, or the request was different.
        """
        path = path_of(path)
        RunFolder.check(path, resume=resume)
        if resume:
            request.resume(path, requested, storage)
        return resume

    @staticmethod
    def check(path: str | Path, *, resume: bool) -> None:
        """Raises StudyError if `path` contains a run without `resume`, or none with it."""
        path = path_of(path)
        resumed = holds_run(path)
        if resumed and not resume:
            raise StudyError(
                f"'{path}' already contains a run{_of(path)}; continue it with {option('resume', True)}, or give "
                f"another {option('out')} for a new one"
            )
        if resume and not resumed:
            raise StudyError(
                f"'{path}' contains no run to resume; leave {option('resume', True)} out to start one there"
            )

    @staticmethod
    def asked(path: str | Path) -> dict[str, Any]:
        """Returns the request in the run.yaml of `path`; empty without a run.

        Raises:
            StudyError: run.yaml cannot be read, or is damaged.
        """
        path = path_of(path)
        return dict(request.read(path)[0]["asked"]) if holds_run(path) else {}

    def record_hosts(self, per_host: int | None) -> None:
        """Stores a trial's devices per host in run.yaml. On a cluster only the runner knows them; None if it does not.

        Raises:
            StudyError: it cannot be written.
        """
        devices = self.document["asked"].setdefault("devices", {})
        if per_host is None or devices.get("per_host") == per_host:
            return
        devices["per_host"] = per_host
        try:
            write_yaml(self.path / RUN, self.document)
        except OSError as error:
            raise cannot_write(self.path / RUN, error) from error

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs with a column in trials.csv, in order."""
        return self._rows.knobs

    def finish(self, number: int, measurement: Measurement) -> Trial:
        """Stores the outcome of trial `number` in the ledger and in trials.csv, and returns the trial.

        If the table cannot be written, that is a warning, and the table is written with the next trial.

        Raises:
            StudyError: the ledger could not be written. The outcome is in `trials()` nevertheless, and in trials.csv
                if that can be written.
        """
        try:
            return self.ledger.finish(number, measurement)
        finally:
            self._tabulate()

    def remeasure(self, number: int, throughputs: Sequence[float], failure: Measurement | None = None) -> Trial:
        """Stores all re-measurements of trial `number` in the ledger and in trials.csv, and returns the trial (see
        `Ledger.remeasure`).

        Raises:
            StudyError: the trial does not exist, or the ledger could not be written.
        """
        try:
            return self.ledger.remeasure(number, throughputs, failure)
        finally:
            self._tabulate()

    def log_path(self, number: int) -> Path:
        """Returns the path of a trial's log. Its folder exists, and an existing link is removed."""
        path = self.path / LOGS / f"{number}.log"
        if path.is_symlink():
            path.unlink()
        return path

    def write_best(
        self,
        command: Sequence[str],
        *,
        devices: Mapping[str, Any] | None = None,
        again_s: float | None = None,
        stopped: str = "",
    ) -> Path:
        """Writes best.yaml from the trials so far, and returns its path.

        Args:
            command: arguments of the command that reproduces the winner.
            devices: the present devices, for the environment.
            again_s: time spent on measuring the leaders again, s.
            stopped: why the search did not end by itself; empty if it did.

        Raises:
            StudyError: it cannot be written; the old file is unchanged.
        """
        path = self.path / BEST
        facts = environment.describe(devices)
        try:
            requested = self.document.get("asked", {})
            mark = {name: True for name in ("simulated", "emulated") if requested.get(name)}
            contents = best.document(
                self.trials(),
                command=command,
                environment=facts,
                request=requested,
                again_s=again_s,
                folder=self.path,
                stopped=stopped,
            )
            write_yaml(path, mark | contents)
        except OSError as error:
            raise cannot_write(path, error) from error
        return path

    def close(self) -> None:
        """Releases the folder, with trials.csv up to date if it can be written. May be called twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._tabulate()  # an interrupt may have occurred between a trial's record in the ledger and its row
            self.ledger.close()
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tabulate(self) -> None:
        with self._mutex:
            try:
                self._rows.write(self.trials())
            except OSError as error:
                reason = error.strerror or str(error)
                if reason != self._behind:
                    self._warn(
                        f"cannot write '{self._rows.path}': {reason}; this is retried after the next "
                        "trial, and the ledger is complete"
                    )
                self._behind = reason
            else:
                self._behind = None


def _make_logs(path: Path) -> None:
    """Creates the folder of logs.

    Raises:
        StudyError: a link is in its place.
    """
    if (path / LOGS).is_symlink():
        raise StudyError(f"'{path / LOGS}' is a symbolic link, and links in a run's folder are not followed; remove it")
    (path / LOGS).mkdir(exist_ok=True)


def _remove(path: Path, *names: str) -> None:
    """Undoes the creation of files in a folder, and of the folder itself if it was new and is now empty."""
    for name in names:
        with contextlib.suppress(OSError):  # the original error is reported instead
            (path / name).rmdir() if name == LOGS else (path / name).unlink(missing_ok=True)
    if ".lock" in names:
        with contextlib.suppress(OSError):
            path.rmdir()


def _of(path: Path) -> str:
    try:
        model = request.read(path)[0]["asked"].get("model")
    except StudyError:  # the folder contains a run in any case
        return ""
    return f" of {model}" if model else ""


def instead_of_run(path: Path) -> str:
    """Returns the end of a message about a folder without a run: the training or the runs that it contains; empty if it
    contains neither.
    """
    if holds_training(path):
        return f"; it contains a training, whose steps are in '{path / LOG}'"
    below = sorted(file.parent.name for name in (RUN, TABLE) for file in path.glob(f"*/{name}"))
    return f"; there is one in '{path / below[0]}'" if below else ""


class View:
    """A run for reading, also while another process works on it. Nothing is locked or written. A best.yaml outside its run,
    or a plan, is a run of one trial.

    Args:
        path: the run's folder, or a best.yaml.
        make_config: makes a configuration from a mapping of its values.
        storage: storage of the ledger if it is not in the folder; as for `Ledger.load`. A storage named in run.yaml is
            never opened automatically.

    Raises:
        StudyError: there is no run, or it cannot be read.
        MissingDependency: the storage needs a package that is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        *,
        storage: str | None = None,
    ) -> None:
        self.path = run_of(path_of(path))
        self.problems: list[str] = []
        """Missing or damaged parts."""
        if best.is_plan(self.path):
            plan = best.load(self.path)
            self.document: dict[str, Any] | None = dict(plan.document)
            """The contents of run.yaml; None if it is missing."""
            self._trials = [replace(plan.trial, config=make_config(plan.trial.config))]
            self.best: dict[str, Any] | None = None
            """The contents of best.yaml; None without one, or if it is about other trials."""
            self.state = PLAN
            """See `names`."""
            return
        if self.path.is_file():
            raise StudyError(f"'{path}' is a file; give the folder of a run, or its {BEST}")
        if not self.path.is_dir():
            raise StudyError(f"there is no folder '{path}'; give the {option('out')} of a run")
        if not holds_run(self.path):
            raise StudyError(
                f"'{path}' contains no run: it has neither {RUN} nor {LEDGER} nor {TABLE}{instead_of_run(self.path)}"
            )
        self.document = None
        if (self.path / RUN).exists():
            self.document, self.problems = request.read(self.path)
        else:
            self.problems.append(f"{self.path / RUN} is missing")
        self._trials = self._read(make_config, storage)
        running = is_running(self.path)
        self.best = best.read(self.path, self.problems)
        if self.best is not None and not best.covers(self.best, [trial for trial in self._trials if not trial.pending]):
            if not running:
                self.problems.append(f"{BEST} is about other trials; the winner shown is that of the ledger")
            self.best = None
        self.state = state_of(running, self.best)

    def trials(self) -> list[Trial]:
        """Returns all trials by number, as of the creation of the view."""
        return list(self._trials)

    def _read(self, make_config: Callable[[Mapping[str, Any]], Any], storage: str | None) -> list[Trial]:
        name = self.document["study"] if self.document else None
        lossy = lossy_of(self.document)
        if storage is not None:
            ledger = Ledger.load(storage, name=name, make_config=make_config, lossy=lossy)
            self.problems += ledger.problems
            return ledger.trials()
        named_storage = (self.document or {}).get("storage")
        if named_storage:
            raise StudyError(
                f"the trials are in the storage '{named_storage}', which is opened only if you name it with {option('storage')}"
            )
        try:
            data = read_inside(self.path, LEDGER, at_most=LARGEST_LEDGER)
            origin = f"'{self.path / LEDGER}'"
            ledger = Ledger.parse(data, origin=origin, name=name, make_config=make_config, lossy=lossy)
        except FileNotFoundError:
            if (self.path / TABLE).exists():
                raise StudyError(f"there is no ledger at '{self.path / LEDGER}'") from None
            return []  # killed before the ledger was created
        except OSError as error:
            raise StudyError(f"cannot read '{self.path / LEDGER}': {error.strerror or error}") from error
        self.problems += ledger.problems
        return ledger.trials()
