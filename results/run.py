"""A run's folder: what a search leaves in `--out`, and how it is taken up again."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.lock import FolderLock
from ..base.reading import path_of
from ..base.writing import cannot_write, make_folder, write_yaml
from ..knobs.lossy import lossy_of
from . import best, environment, request, table
from .ledger import Ledger
from .measurement import Measurement, Trial
from .names import BEST, LEDGER, LOGS, RUN, TABLE, holds_run


class RunFolder:
    """The folder of a run that this process works on: it holds its lock, writes its files, keeps its trials.

    Made by `RunFolder.open`; `View` is for reading. May be used from several threads.
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
        """The trials' ledger; write to it through this folder, so that trials.csv follows."""
        self.resumed = resumed
        """Whether the folder held this run before."""
        self.notes = tuple(notes)
        """What the user should know of how it was taken up: changed versions, a changed sampler."""
        self._rows = rows
        self._lock = lock
        self._warn = warn
        self._behind: str | None = None
        self._closed = False
        self._mutex = threading.RLock()
        for trial in ledger.trials():
            self._rows.put(trial)

    @classmethod
    def open(
        cls,
        path: str | Path,
        asked: Mapping[str, Any],
        *,
        knobs: Mapping[str, Sequence[Any] | None],
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        storage: str | None = None,
        resume: bool = False,
        warn: Callable[[str], None] = lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2),
    ) -> "RunFolder":
        """Starts a run in `path`, or takes up the one that is there.

        Args:
            path: the folder; created if it is not there. Files of others in it are left alone.
            asked: what run.yaml keeps. `request.BINDING` are the keys that a resumed run must repeat,
                `request.INFORMATIVE` those worth a note when they change; others are free.
            knobs: the values of each knob, in the order of their columns; None for a derived one.
            make_config: makes a configuration from a mapping of its values.
            storage: URL of an Optuna storage for the ledger; None for `study.log` in the folder. A run that has one
                is resumed with it named again: what run.yaml names is never opened by itself.
            resume: continue the run that is there.
            warn: told of what goes wrong without ending the run.

        Raises:
            StudyError: the folder or storage cannot be used (locked, full, read-only, damaged), holds a run
                and `resume` is off, none and `resume` is on, or a run that was asked something else. Nothing in it
                is changed then.
        """
        path = path_of(path)
        created = make_folder(path)
        with contextlib.ExitStack() as undo:
            lock = FolderLock(path)
            undo.callback(lock.release)
            if created:
                undo.callback(_remove, path, ".lock")
            resumed = cls.resumable(path, asked, storage=storage, resume=resume)
            document, notes = (
                request.resume(path, asked, storage) if resumed else (request.begin(path, asked, storage), [])
            )
            if not resumed:
                undo.callback(_remove, path, RUN, LEDGER, TABLE, LOGS)
            try:
                if not resumed:
                    # Before the ledger, so that a run killed in between can be resumed.
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
                # Trials of before may have knobs that are not asked for any more.
                stray = {name: None for trial in ledger.trials() for name in trial.config if name not in knobs}
                rows = table.Table(path / TABLE, {**knobs, **stray})
                folder = cls(path, document, ledger, rows, lock, resumed=resumed, notes=notes, warn=warn)
                _make_logs(path)
                rows.write()
                if resumed:
                    write_yaml(path / RUN, document)
            except OSError as error:
                raise cannot_write(path, error) from error
            undo.pop_all()
        return folder

    @staticmethod
    def resumable(
        path: str | Path, asked: Mapping[str, Any], *, storage: str | None = None, resume: bool = False
    ) -> bool:
        """Whether `path` holds the run that is to be taken up; changes nothing.

        Args:
            path, asked, storage, resume: as for `open`.

        Raises:
            StudyError: it holds a run and `resume` is off, none and `resume` is on, or one that was asked
                something else.
        """
        path = path_of(path)
        resumed = holds_run(path)
        if resumed and not resume:
            raise StudyError(
                f"'{path}' already holds a run{_of(path)}; continue it with --resume, "
                "or give another --out for a new one"
            )
        if resume and not resumed:
            raise StudyError(f"'{path}' holds no run to resume; leave --resume out to start one there")
        if resumed:
            request.resume(path, asked, storage)
        return resumed

    @staticmethod
    def asked(path: str | Path) -> dict[str, Any]:
        """What the run in `path` was asked, as its run.yaml has it; empty where there is no run.

        Raises:
            StudyError: run.yaml cannot be read, or is damaged.
        """
        path = path_of(path)
        return dict(request.read(path)[0]["asked"]) if holds_run(path) else {}

    def record_hosts(self, per_host: int | None) -> None:
        """Keeps in run.yaml how many of a trial's devices a host has, which on a cluster only its runner finds
        out; None where it found out nothing.

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
        """The knobs that have a column in trials.csv, in their order."""
        return self._rows.knobs

    def start(
        self,
        config: Any,
        *,
        sampler: str,
        predicted_throughput: float | None = None,
        predicted_memory_mib: float | None = None,
    ) -> Trial:
        """A new pending trial, stored before this returns.

        Raises:
            StudyError: it cannot be stored.
        """
        return self.ledger.start(
            config,
            sampler=sampler,
            predicted_throughput=predicted_throughput,
            predicted_memory_mib=predicted_memory_mib,
        )

    def finish(self, number: int, measurement: Measurement) -> Trial:
        """The trial `number` with its outcome, in the ledger and in trials.csv before this returns.

        A table that cannot be written is a warning, and written with the next trial.

        Raises:
            StudyError: the ledger could not be written; the outcome is in `trials()` nevertheless, and in
                trials.csv if that can be written.
        """
        try:
            trial = self.ledger.finish(number, measurement)
        except StudyError:
            self._tabulate(self.ledger.trial(number))
            raise
        self._tabulate(trial)
        return trial

    def remeasure(self, number: int, throughputs: Sequence[float], failure: Measurement | None = None) -> Trial:
        """The trial `number` with these as all its re-measurements, in the ledger and in trials.csv (see
        `Ledger.remeasure`).

        Raises:
            StudyError: there is no such trial, or the ledger could not be written.
        """
        trial = self.ledger.remeasure(number, throughputs, failure)
        self._tabulate(trial)
        return trial

    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers, pending ones too."""
        return self.ledger.trials()

    def pending(self) -> list[Trial]:
        """The trials to be run (again) under their numbers: those in flight when the run was interrupted."""
        return self.ledger.pending()

    def attempt(self, number: int, attempts: int) -> Trial:
        """The pending trial `number` as one begun so often (see `Ledger.attempt`)."""
        return self.ledger.attempt(number, attempts)

    def log_name(self, number: int) -> str:
        """Path of a trial's log relative to the folder, as `Measurement.log` keeps it."""
        return f"{LOGS}/{number}.log"

    def log_path(self, number: int) -> Path:
        """Path of a trial's log; its folder exists, and it is no link to somewhere else."""
        path = self.path / LOGS / f"{number}.log"
        if path.is_symlink():
            path.unlink()
        return path

    def write_best(
        self, command: Sequence[str], *, devices: Mapping[str, Any] | None = None, again_s: float | None = None
    ) -> Path:
        """Writes best.yaml from the trials so far, and returns its path.

        Args:
            command: the arguments of the command that reproduces the winner.
            devices: the devices at hand, for the environment.
            again_s: what measuring the leaders again took, s.

        Raises:
            StudyError: it cannot be written; the old one is untouched.
        """
        path = self.path / BEST
        facts = environment.describe(devices)
        try:
            asked = self.document.get("asked", {})
            mark = {name: True for name in ("simulated", "emulated") if asked.get(name)}
            told = best.document(self.trials(), command=command, environment=facts, asked=asked, again_s=again_s)
            write_yaml(path, mark | told)
        except OSError as error:
            raise cannot_write(path, error) from error
        return path

    def close(self) -> None:
        """Lets go of the folder, with trials.csv up to date where it can be written. May be called twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            # An interrupt may have come between a trial's record in the ledger and its row.
            missing = [trial for trial in self.trials() if not trial.pending and trial.number not in self._rows]
            if missing or self._behind is not None:
                self._tabulate(*missing)
            self.ledger.close()
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tabulate(self, *trials: Trial) -> None:
        with self._mutex:
            for trial in trials:
                self._rows.put(trial)
            try:
                self._rows.write()
            except OSError as error:
                reason = error.strerror or str(error)
                if reason != self._behind:
                    self._warn(
                        f"cannot write '{self._rows.path}': {reason}; it is tried again after the next "
                        "trial, and the ledger has everything"
                    )
                self._behind = reason
            else:
                self._behind = None


def _make_logs(path: Path) -> None:
    """Makes the folder of logs.

    Raises:
        StudyError: a link stands in its place.
    """
    if (path / LOGS).is_symlink():
        raise StudyError(f"'{path / LOGS}' is a symbolic link, and links in a run's folder are not followed; remove it")
    (path / LOGS).mkdir(exist_ok=True)


def _remove(path: Path, *names: str) -> None:
    """Takes back what was begun in a folder; the folder too, if that leaves it empty and it was new."""
    for name in names:
        with contextlib.suppress(OSError):  # the error that led here is the one to report
            (path / name).rmdir() if name == LOGS else (path / name).unlink(missing_ok=True)
    if ".lock" in names:
        with contextlib.suppress(OSError):
            path.rmdir()


def _of(path: Path) -> str:
    try:
        model = request.read(path)[0]["asked"].get("model")
    except StudyError:  # whatever is wrong with it, the folder is taken
        return ""
    return f" of {model}" if model else ""
