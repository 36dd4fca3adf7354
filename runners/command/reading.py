"""Numbers that a command reports while it runs: lines it prints, files it writes, TensorBoard events, `redline.report`."""

import csv
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ...base.errors import MissingDependency, UsageError
from ...base.reporting import TIME
from ...frameworks.registry import FRAMEWORKS, find_framework
from .objective import BESIDE, PREFERRED

_IN_NAME = "tfevents"
"""What the name of every event file holds, as TensorBoard looks for it."""


class Events:
    """Scalars in an event file, or in all of a folder, by their tags; `step` is the step they are of.

    What is in it already is an earlier run's, which is told by the events' times: these are those of the host's clock.

    Args:
        path: need not be there yet; files may come later, in folders below it too.
        names: metrics by their tags; all others are taken as they are called.
    """

    def __init__(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._names = names or {}
        self._since = time.time()
        self._loaders: dict[Path, Any] = {}

    def read(self, now: float, *, ended: bool = False) -> "list[Told]":
        """What was written since it was last asked, by the times of the events.

        Args:
            now: this moment, s of the monotonic clock.
            ended: whether nothing is written any more; event files are read alike.

        Raises:
            UsageError: it is a file of another kind.
        """
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        offset = now - time.time()
        found = []
        for path in self._files():
            if path not in self._loaders:
                self._loaders[path] = EventFileLoader(str(path))
            for event in self._loaders[path].Load():
                values = dict(_scalars(event))
                if values and event.wall_time >= self._since:
                    told = renamed({"step": float(event.step), **values}, self._names)
                    found.append(Told(told, event.wall_time + offset))
        return sorted(found, key=lambda told: told.at)

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(each for each in self.path.rglob(f"*{_IN_NAME}*") if each.is_file())
        if not self.path.is_file():
            return []
        if _IN_NAME not in self.path.name:
            raise UsageError(
                f"--metric-file: {self.path} is a file and no folder of TensorBoard's; give it an ending, .jsonl or .csv, if "
                "it is JSON lines or CSV"
            )
        return [self.path]


def of_events(path: Path, *, look: bool = True) -> bool:
    """Whether a path is that of event files: a folder, a name without an ending where nothing is yet, or such a name as
    TensorBoard gives; without `look` by its name alone."""
    if not look:
        return _IN_NAME in path.name or not path.suffix
    return path.is_dir() or _IN_NAME in path.name or not (path.suffix or path.exists())


def check_installed() -> None:
    """Raises:
    MissingDependency: what reads event files is not installed.
    """
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "--metric-file is a folder or an event file, which TensorBoard reads: pip install tensorboard. A file of JSON "
            "lines or CSV has an ending, .jsonl or .csv"
        ) from error


def _scalars(event: Any) -> Iterator[tuple[str, float]]:
    """The single numbers of an event, by tag, whichever way they were written."""
    from tensorboard.util.tensor_util import make_ndarray

    for value in event.summary.value:
        if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
            continue
        array = make_ndarray(value.tensor)
        if array.dtype.kind in "fiu":
            yield value.tag, float(array.reshape(-1)[0])


LONGEST_LINE = 64 * 1024
"""Bytes of a line that are looked at; of a longer one the first."""
RANKS_APART = 4
"""Steps by which ranks that each show a bar may be apart; a bar that falls back to less than half begins anew."""
NEAR_S = 0.005
"""How near two moments may be that a step is timed by: on a busy machine a line is read that much late, s."""
_NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))(?P<scale>[kKMG])?",
    re.IGNORECASE,
)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPLIT = re.compile(rb"[\r\n]")
_OF_PATTERNS = re.compile(r"\(\?|[\\\[\]*+^$|{}]")
"""What regular expressions have and names, such as `throughput(tps)`, have not."""

NANOTRON = (
    r"tokens_per_sec: (?P<tokens_per_second>[\d.]+(?:[KMG]|E[+-]\d+)?) \|(?:.*?lm_loss: (?P<loss>[\d.Ee+-]+|nan))?"
)
"""How src/nanotron/trainer.py prints a step, of which nothing else is known; earlier versions wrote 8.66E+05."""


@dataclass(frozen=True, slots=True)
class Told:
    """Numbers that were told at one moment."""

    values: Mapping[str, float]
    """By metric."""
    at: float
    """When, s of the monotonic clock."""


@dataclass
class Lines:
    """Splits a stream into lines, at carriage returns too, and finds numbers in them.

    Args:
        patterns: regular expressions whose groups have the names of metrics.
        names: metrics by the names they have in lines that are JSON objects, and in files.
        asked: the metrics that were asked for, in their order; none where all that known frameworks print is read.
    """

    patterns: Sequence[re.Pattern[str]]
    names: Mapping[str, str] = field(default_factory=dict)
    asked: Sequence[str] = ()
    _rest: bytes = field(default=b"", init=False)

    @property
    def first(self) -> str | None:
        """The objective that was asked for; None where none was."""
        return next((name for name in self.asked if name not in BESIDE), None)

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that are complete with these bytes."""
        *whole, self._rest = _SPLIT.split(self._rest + data)
        self._rest = self._rest[:LONGEST_LINE]
        for line in whole:
            if line:
                yield _text(line[:LONGEST_LINE])

    def last(self) -> Iterator[str]:
        """What is left without an end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)

    def read(self, line: str) -> dict[str, float]:
        """The numbers in a line, by metric; of several patterns the first that finds one."""
        found: dict[str, float] = {}
        for pattern in self.patterns:
            if match := pattern.search(line):
                for name, text in match.groupdict().items():
                    if text is not None and name not in found and (value := number(text)) is not None:
                        found[name] = value
        if self.names and line.lstrip().startswith("{"):
            told = _of_object(line)
            found = {**{self.names[name]: told[name] for name in self.names if name in told}, **found}
        return found


class StepNumbers:
    """What a step takes, by the moments at which its number is told.

    A bar is drawn more than once a step, and by every rank. On a busy machine its lines come late and several at once:
    a step is timed by the last of those told together, and never by two that are told within `NEAR_S`.
    """

    def __init__(self) -> None:
        self._from: tuple[float, float] | None = None
        """The step since which the next one is timed, and when it was told."""
        self._last: tuple[float, float] | None = None
        """The highest step, and when it was told first."""

    def told(self, step: float, at: float) -> float | None:
        """Takes a step's number, told at a moment (s).

        Returns:
            What the steps told before that moment took, as `step_ms` says it.
        """
        took = self.step_ms() if self._last is not None and at > self._last[1] else None
        if self._last is not None and step <= self._last[0]:
            if step >= self._last[0] / 2 or self._last[0] <= RANKS_APART:
                return took
            self._from = None
        self._last = (step, at)
        return took

    def step_ms(self) -> float | None:
        """Of each of the steps since those that were timed last, ms; None as long as that is not known."""
        if self._last is None or self._from is None:
            self._from = self._last
            return None
        steps, seconds = self._last[0] - self._from[0], self._last[1] - self._from[1]
        if not steps or seconds < NEAR_S:
            return None
        self._from = self._last
        return seconds / steps * 1e3


class Appended:
    """Numbers in a file that grows: JSON lines, or CSV with a header. What is in it already is an earlier run's.

    Args:
        path: need not be there yet.
        names: metrics by the names they have in the file; all others are taken as they are called.
    """

    def __init__(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._names = names or {}
        self._at, self._rest = 0, b""
        self._header: list[str] | None = None
        self._earlier = _contents(path)

    def read(self, now: float, *, ended: bool = False) -> list[Told]:
        """What was appended since it was last asked, in its order.

        Args:
            now: the moment that rows without one of their own are from, s.
            ended: whether nothing is appended any more, so that the last line may lack its end.
        """
        try:
            with self.path.open("rb") as file:
                if self._earlier is not None and not self._begins(file):
                    return []
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if ended:
            whole, self._rest = [*whole, self._rest], b""
        found = []
        for line in whole:
            values = self._row(line.decode("utf-8", "replace").strip())
            at = values.pop(TIME, now)
            if values:
                found.append(Told(values, at))
        return found

    def _begins(self, file: BinaryIO) -> bool:
        """Whether this run has written to a file that was there before; finds where."""
        assert self._earlier is not None
        stamp, size, start = self._earlier
        if _stamp(file) == stamp:
            return False
        # What is longer, and begins as it did, was appended to; else it was written anew.
        if os.fstat(file.fileno()).st_size > size and file.read(len(start)) == start:
            self._at = size
            self._row(start.partition(b"\n")[0].decode("utf-8", "replace").strip())
        self._earlier = None
        return True

    def _row(self, line: str) -> dict[str, float]:
        if line.startswith("{"):
            values = _of_object(line)
        elif self.path.suffix != ".csv" or not line:
            return {}
        elif self._header is None:
            self._header = next(csv.reader([line]))
            return {}
        else:
            cells = zip(self._header, next(csv.reader([line])))
            values = {name: value for name, text in cells if (value := number(text)) is not None}
        return renamed(values, self._names)


def renamed(values: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Values by metric, those that `names` knows by another name under that; these count first."""
    other = {name: value for name, value in values.items() if name not in names}
    return {**other, **{names[name]: value for name, value in values.items() if name in names}}


def printed() -> list[str]:
    """How frameworks print what a step took, as regular expressions; what shows progress alone, and losses, at the end."""
    found = [find_framework(name) for name in FRAMEWORKS]
    bars = [each for each in found if each.spoken]
    lines = [each.prints for each in found if each.prints and each not in bars]
    return [*lines, NANOTRON, *(each.prints for each in bars), *(each.spoken for each in bars)]


def lines_for(metrics: Sequence[str]) -> Lines:
    """What reads the metrics that are asked for, or what known frameworks print where none is.

    Args:
        metrics: regular expressions with named groups, or names in JSON, CSV and event files: `NAME`, or `METRIC=NAME`
            where the metric is to be called otherwise. Without that it is called by what follows the last slash, where
            that is a known metric: `train/steps_per_second` is one.

    Raises:
        UsageError: one is no regular expression, none of its groups has a name, or two have the same.
    """
    if not metrics:
        known = {name: name for name in (*PREFERRED, *BESIDE)}
        return Lines([re.compile(each) for each in printed()], known)
    patterns: list[re.Pattern[str]] = []
    names: dict[str, str] = {}
    asked: list[str] = []
    for text in metrics:
        if _OF_PATTERNS.search(text):
            pattern = _pattern(text)
            patterns.append(pattern)
            asked += [name for name in pattern.groupindex if name not in asked]
            continue
        called, equals, name = text.partition("=")
        if not (equals and called.isidentifier() and name):
            last = text.rpartition("/")[2]
            called, name = last if last in (*PREFERRED, *BESIDE) else text, text
        if called in names.values():
            other = next(each for each in names if names[each] == called)
            raise UsageError(f"--metric: '{other}' and '{name}' are both called {called}; write one as OTHER={name}")
        names[name] = called
        asked.append(called)
    return Lines(patterns, names, asked)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--metric '{text}' is no regular expression: {error}") from None
    if not pattern.groupindex:
        raise UsageError(
            f"--metric '{text}' names no number; write it as a group with a name, such as "
            r"'speed: (?P<tokens_per_second>[\d.]+)'"
        )
    return pattern


def _contents(path: Path) -> tuple[tuple[int, int], int, bytes] | None:
    """What tells whether a file was written to, its size and how it begins; None where it is not there."""
    try:
        with path.open("rb") as file:
            return _stamp(file), os.fstat(file.fileno()).st_size, file.read(LONGEST_LINE)
    except (FileNotFoundError, IsADirectoryError):
        return None


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_mtime_ns


def near_misses(lines: Sequence[str], wanted: Sequence[str], most: int = 3) -> list[str]:
    """Of these lines those that may be meant: with a number and a word of a metric's name."""
    words = {
        word for name in wanted for word in name.lower().split("_") if len(word) > 2 and word not in ("per", "second")
    }
    words |= {"tok", "sample", "iter", "step", "it/s", "sec"} if not words else set()
    found = [
        line for line in lines if any(char.isdigit() for char in line) and any(word in line.lower() for word in words)
    ]
    return found[-most:]


def _text(line: bytes) -> str:
    """A line without colours."""
    return _COLOURS.sub("", line.decode("utf-8", "replace"))


def number(text: str) -> float | None:
    """A number as programs print it, `1,234.5`, `26.5K`, `nan`; None where it is none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    return float(match["number"].replace(",", "")) * _SCALES[(match["scale"] or "").lower()]


def _of_object(line: str) -> dict[str, float]:
    """The numbers of a JSON object."""
    try:
        given = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(given, dict):
        return {}
    return {
        name: float(value)
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
