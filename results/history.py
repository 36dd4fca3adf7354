"""The log of a training as curves, read as it grows and thinned so that millions of steps become a few hundred points."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import schema
from .trained import LogReader, step_before

STRETCHES = 256
"""Largest number of intervals of steps in a curve; each has up to three points."""
EVENTS = 200
"""Number of latest checkpoints, restarts and failures that are kept."""
LINES = 60
"""Number of latest lines of the log that are kept."""
SERIES = ("loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "step_ms", "mfu", "memory_mib")
"""Names in the log of the values that become curves."""

_HIGHEST = 2**53  # the largest step that JavaScript, which draws the curves, represents exactly
_LONGEST = 400  # characters of a text that pages show
_Point = tuple[int, float]


class Curve:
    """Values over increasing steps: the lowest, the highest and the last value of each interval of steps.

    All intervals have the same width, which doubles whenever there would be more than `STRETCHES`. A drawing of that
    many pixels looks the same as with all points, and memory is bounded.
    """

    def __init__(self) -> None:
        self._width = 1
        self._begins: list[int] = []
        self._kept: list[list[_Point]] = []

    def add(self, step: int, value: float) -> None:
        """Adds a value at a step after all others."""
        begin, point = step - step % self._width, (step, value)
        if self._begins and self._begins[-1] == begin:
            _widen(self._kept[-1], point)
            return
        self._begins.append(begin)
        self._kept.append([point, point, point])
        if len(self._begins) > STRETCHES:
            self._halve()

    def back(self, step: int) -> None:
        """Removes all values after a step."""
        keep = bisect_right(self._begins, step)
        del self._begins[keep:], self._kept[keep:]
        if self._kept:
            remaining = [point for point in self._kept[-1] if point[0] <= step]
            if remaining:
                self._kept[-1] = _of(remaining)
            else:
                del self._begins[-1], self._kept[-1]

    def points(self) -> list[_Point]:
        """Returns the kept points, by steps."""
        return [point for interval in self._kept for point in sorted(set(interval))]

    def _halve(self) -> None:
        while len(self._begins) > STRETCHES:
            self._width *= 2
            merged: dict[int, list[_Point]] = {}
            for interval in self._kept:
                begin = interval[2][0] - interval[2][0] % self._width
                merged[begin] = _of([*merged.get(begin, ()), *interval])
            self._begins, self._kept = list(merged), list(merged.values())


def _of(points: list[_Point]) -> list[_Point]:
    """Returns the lowest, the highest and the last of some points."""
    return [min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1]), max(points)]


def _widen(interval: list[_Point], point: _Point) -> None:
    if point[1] < interval[0][1]:
        interval[0] = point
    if point[1] > interval[1][1]:
        interval[1] = point
    interval[2] = point


class History:
    """The contents of a training's log so far. Repeated steps count once, with their latest values."""

    def __init__(self, folder: Path) -> None:
        self._reader = LogReader(folder)
        self._forget()

    def _forget(self) -> None:
        self.curves = {name: Curve() for name in SERIES}
        """By name in the log."""
        self.held_out = Curve()
        """Losses of evaluations."""
        self.step = 0
        """Last step in the log."""
        self.last: dict[str, Any] = {}
        """Last line of a step."""
        self.began: float | None = None
        """Time of the first line, s since 1970."""
        self.end: dict[str, Any] | None = None
        """The final line; None if the training runs or its ranks were lost."""
        self.checkpoints: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        """Saved checkpoints and failed attempts."""
        self.resumed: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        """Points at which it was resumed."""
        self.lines: deque[dict[str, Any]] = deque(maxlen=LINES)
        """The last lines, unchanged."""
        self.passed_over = 0
        """Number of lines of an unknown kind."""

    @property
    def unread(self) -> int:
        """Size of the unread part of the log, bytes."""
        return self._reader.unread

    @property
    def damaged(self) -> int:
        """Number of lines that cannot be read."""
        return self._reader.damaged + self.passed_over

    def read(self, seconds: float) -> bool:
        """Reads new lines for about `seconds`. Returns True if there were any.

        Raises:
            OSError: the log cannot be read.
        """
        until, news = time.monotonic() + seconds, False
        while True:
            if self._reader.replaced():
                self._forget()
                news = True
            position = self._reader.position
            for line in self._reader.lines(at_most=1 << 20):
                self._take(line)
            news = news or self._reader.position > position
            if self._reader.position == position or not self._reader.unread or time.monotonic() >= until:
                return news

    def _take(self, line: Mapping[str, Any]) -> None:
        kind, step = line.get("kind"), line.get("step")
        if kind not in ("step", "evaluation", "checkpoint", "resumed", "note", "end") or not isinstance(kind, str):
            self.passed_over += 1
            return
        if kind != "note" and not (isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _HIGHEST):
            self.passed_over += 1
            return
        plain = {str(name)[:80]: _plain(value) for name, value in list(line.items())[:40]}
        self.lines.append(plain)
        if self.began is None:
            self.began = number(line.get("time"))
        if kind == "note":
            return
        assert isinstance(step, int), "checked above"
        again = step_before(line, self.step)
        if again is not None:  # the steps after it are repeated: their earlier values are removed
            for curve in (*self.curves.values(), self.held_out):
                curve.back(again)
        if kind in ("step", "evaluation", "resumed"):
            self.step, self.end = step, None
        if kind == "step":
            self.last = plain
            for name, curve in self.curves.items():
                if (value := number(line.get(name))) is not None:
                    curve.add(step, value)
        elif kind == "evaluation":
            if (value := number(line.get("loss"))) is not None:
                self.held_out.add(step, value)
        elif kind == "end":
            self.end = plain
        else:
            (self.checkpoints if kind == "checkpoint" else self.resumed).append(plain)


def number(value: Any) -> float | None:
    """Returns a finite number as a float; None for anything else."""
    return float(value) if schema.number(value) else None


def _plain(value: Any) -> Any:
    """Returns a value that pages can show: a text, a boolean or a finite number."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return number(value)
    return str(value)[:_LONGEST]
