"""Cache of the trainings below a folder for the pages; logs are read further as they grow."""

import itertools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import NotFound, StudyError, unknown
from ...base.reading import tail_inside
from ...results import state
from ...results.history import History, number
from ...results.trained import DOCUMENT, LOG, LOGS, holds_training, read_document
from ..report.document import as_json
from .discover import Folders

READING_S = 0.5
"""Seconds for which a request reads a log at most; the next request continues."""
SPARKS = 48
"""Points of a sparkline at most."""
STRATEGIES = 100
"""Configurations of a training that are shown at most, the latest ones."""
PRINTED_BYTES = 64 * 1024
"""Bytes shown from the end of the output of the ranks."""


class Trainings:
    """The trainings under a folder. Thread-safe.

    Args:
        folders: the folders found; nothing else is read.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._followed: dict[str, _Followed] = {}
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        """Returns the trainings, as paths below the root."""
        training_ids = list(self._folders.latest().trainings)
        with self._lock:
            for gone in self._followed.keys() - set(training_ids):
                del self._followed[gone]
        return training_ids

    def folder(self, training: str) -> Path:
        """Returns the folder of a training.

        Raises:
            NotFound: the training does not exist; an unknown path is never opened.
        """
        if training not in (training_ids := self.ids()):
            raise NotFound(unknown("training", training, training_ids[:20]))
        return self._folders.root / training

    def lines(self) -> list[dict[str, Any]]:
        """Returns one line for each training, the running ones first and then those that changed last.

        A long log is read over several calls.
        """
        until, lines = time.monotonic() + READING_S, []
        for training in self.ids():
            try:
                followed = self._of(training)
            except NotFound:  # deleted since the folders were listed
                continue
            with followed.lock:
                followed.read(max(0.0, until - time.monotonic()))
                lines.append({"training": training, **followed.line()})
        return sorted(lines, key=lambda line: (line["state"] != state.RUNNING, -line["changed"], line["training"]))

    def changes(self, training: str, have: str = "") -> dict[str, Any] | None:
        """Returns the contents of the page of a training with their `version`; None if that is `have`.

        Raises:
            NotFound: the training does not exist.
        """
        followed = self._of(training)
        with followed.lock:
            followed.read(READING_S)
            version = followed.version
            return None if version == have else {"version": version, "training": training, **followed.document()}

    def printed(self, training: str) -> tuple[str, str, int]:
        """Returns the output of the latest ranks: name of the file, its end, and its size, bytes.

        Raises:
            NotFound: the training does not exist.
            OSError: the file does not exist or cannot be read.
        """
        folder = self.folder(training)
        names = [log for log in os.listdir(folder / LOGS) if log.endswith(".log") and log[:-4].isdecimal()]
        if not names:
            raise FileNotFoundError("the ranks were never started, or their logs were deleted")
        name = f"{LOGS}/{max(names, key=lambda log: int(log[:-4]))}"
        return (name, *tail_inside(folder, name, at_most=PRINTED_BYTES))

    def _of(self, training: str) -> "_Followed":
        folder = self.folder(training)
        if not holds_training(folder):
            raise NotFound(f"training '{training}' no longer exists: its folder was deleted, moved or renamed")
        with self._lock:
            return self._followed.setdefault(training, _Followed(folder))


class _Followed:
    """The cached state of a training; used by one thread at a time, which holds `lock`."""

    _counter = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        # The version contains the start of this process, so that a page that is older requests everything again.
        self._epoch = f"{os.getpid():x}-{time.time_ns():x}"
        self._number = next(self._counter)
        self._history = History(folder)
        self._signature: tuple[Any, ...] = ()
        self._document: Mapping[str, Any] = {}
        self._problems: list[str] = []
        self._unreadable = ""

    @property
    def version(self) -> str:
        """Changes with every change of the contents."""
        return f"{self._epoch}.{self._number}"

    def read(self, seconds: float) -> None:
        """Reads the changes; a long log for about `seconds`."""
        signature = (state.is_running(self.folder, (LOG,)), state.stamp(self.folder / DOCUMENT))
        changed = signature != self._signature
        if changed:
            self._signature = signature
            self._read_document()
        previous, self._unreadable = self._unreadable, ""
        try:
            changed = self._history.read(seconds) or changed
        except OSError as error:
            self._unreadable = f"{LOG} cannot be read: {error.strerror or error}"
        if changed or previous != self._unreadable:
            self._number = next(self._counter)

    def _read_document(self) -> None:
        self._problems = []
        try:
            self._document = read_document(self.folder)
        except StudyError as error:
            self._document = {}
            self._problems = [str(error).replace(str(self.folder), self.folder.name)]

    @property
    def state(self) -> str:
        """Running, finished (the last step is done) or stopped."""
        if self._signature and self._signature[0]:
            return state.RUNNING
        end = self._history.end
        return state.FINISHED if end is not None and not end.get("stopped") else state.STOPPED

    def line(self) -> dict[str, Any]:
        """Returns its line in the list."""
        history, overview = self._history, self._overview()
        losses = [value for _, value in history.curves["loss"].points()]
        held_out = history.held_out.points()
        stamps = [state.stamp(self.folder / name) for name in (LOG, DOCUMENT)]
        return {
            **overview,
            "loss": history.last.get("loss"),
            "held_out": held_out[-1][1] if held_out else None,
            "speed": history.last.get(_column(overview["unit"])),
            "seconds_left": history.last.get("seconds_left"),
            "spark": losses[:: max(1, -(-len(losses) // SPARKS))],
            "changed": max((changed_at[0] / 1e9 for changed_at in stamps if changed_at), default=0.0),
            "problems": len(self._problems_now()),
        }

    def document(self) -> dict[str, Any]:
        """Returns the contents of its page."""
        history = self._history
        strategies = list(enumerate(self._document.get("strategies", []), start=1))[-STRATEGIES:]
        return {
            **self._overview(),
            "folder": self.folder.name,
            "problems": self._problems_now(),
            "unread": history.unread,
            "last": history.last,
            "end": history.end,
            "curves": {name: _columns(curve.points()) for name, curve in history.curves.items()},
            "held_out": _columns(history.held_out.points()),
            "strategies": [_strategy(strategy, position) for position, strategy in strategies],
            "checkpoints": list(history.checkpoints),
            "resumed": list(history.resumed),
            "lines": list(history.lines),
            "asked": _pairs(self._document.get("asked", {})),
            "data": _pairs(self._document.get("data", {})),
        }

    def _overview(self) -> dict[str, Any]:
        document, history = self._document, self._history
        strategies = document.get("strategies") or [{}]
        steps = number(document.get("steps", document.get("asked", {}).get("steps")))
        return as_json(
            {
                "name": str(document.get("name") or self.folder.name)[:200],
                "state": self.state,
                "step": history.step,
                "steps": steps,
                "unit": "samples/s" if document.get("unit") == "samples/s" else "tokens/s",
                "devices": strategies[-1].get("devices"),
                "began": history.began,
            }
        )

    def _problems_now(self) -> list[str]:
        problems = [*self._problems, *([self._unreadable] if self._unreadable else [])]
        if count := self._history.damaged:
            problems.append(
                f"{LOG} has {count:,} line{'' if count == 1 else 's'} that cannot be read, which are left out."
            )
        return problems


def _column(unit: str) -> str:
    return "samples_per_second" if unit == "samples/s" else "tokens_per_second"


def _columns(points: list[tuple[int, float]]) -> list[list[float]]:
    """Returns the steps and the values as two lists."""
    return [[step for step, _ in points], [value for _, value in points]]


def _strategy(strategy: Mapping[str, Any], position: int) -> dict[str, Any]:
    knobs = {str(name)[:80]: _short(value) for name, value in list(strategy["configuration"].items())[:200]}
    return as_json(
        {
            "number": position,
            "step": strategy["step"],
            "devices": strategy["devices"],
            "configuration": knobs,
            "why": str(strategy.get("why", ""))[:500],
        }
    )


def _pairs(section: Any) -> list[list[str]]:
    """Returns names and values as texts."""
    return (
        [[str(name)[:80], str(_short(value))] for name, value in list(section.items())[:100]]
        if isinstance(section, dict)
        else []
    )


def _short(value: Any) -> Any:
    if isinstance(value, list):
        value = ", ".join(str(element) for element in value[:20])
    elif isinstance(value, dict):
        value = ", ".join(f"{name}={element}" for name, element in list(value.items())[:40])
    return value[:300] if isinstance(value, str) else value
