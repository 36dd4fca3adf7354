"""What a person sees while a search runs: a live view on a terminal, plain lines elsewhere."""

import contextlib
import errno
import os
import statistics
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..results import Status, Trial
from ..results.columns import fold, speed
from ..tuner.listener import SearchListener, SearchPlan
from . import words

STYLES = {
    Status.OK: "green",
    Status.OOM: "yellow",
    Status.TIMEOUT: "magenta",
    Status.CRASH: "red",
    Status.WRONG: "red",
    Status.SKIPPED: "dim",
}
_NARROW = 90
"""Columns of a terminal below which a trial's line goes without its memory."""


def listener_for(stream: TextIO, *, silent: bool) -> "ProgressListener":
    """The listener that suits the stream."""
    if silent:
        return ProgressListener()
    # A dumb terminal cannot take back what it has written.
    if not stream.isatty():
        return LineListener(stream)
    terminal = cast(TextIO, Terminal(stream))  # what it has not itself, the stream has
    live = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return TerminalListener(terminal) if live else LineListener(terminal)


class Terminal:
    """A terminal that may go away: what is written then is lost, and nothing else is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _perhaps_gone():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _perhaps_gone():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _perhaps_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class ProgressListener(SearchListener):
    """Says nothing."""

    def __enter__(self) -> "ProgressListener":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class LineListener(ProgressListener):
    """One plain line an event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._plan: SearchPlan | None = None

    def on_start(self, plan: SearchPlan) -> None:
        self._plan = plan
        for line in headline(plan):
            self._print(line)

    def on_wait(self, what: str) -> None:
        self._print(f"{what} ...")

    def on_trial_end(self, trial: Trial) -> None:
        self._print(trial_line(trial, self._plan).plain)

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        if done < total:
            about = f", about {words.duration(seconds)} left" if seconds else ""
            self._print(f"measuring the leaders again: {_turn(done, total)}{about}: {_numbers(leaders)}")

    def on_alternate(self, leaders: list[Trial], seconds: float) -> None:
        self._print(
            f"measuring the leaders again, in short turns, about {words.duration(seconds)}: {_numbers(leaders)}"
        )

    def on_message(self, message: str) -> None:
        self._print(f"note: {message}")

    def _print(self, line: str) -> None:
        print(fold(line), file=self._stream, flush=True)


class TerminalListener(ProgressListener):
    """A line for each finished trial, and below them what is going on.

    What is live never takes more than the width of the terminal, so that a line of it stays one when it is redrawn.
    """

    def __init__(self, stream: TextIO) -> None:
        self._plan: SearchPlan | None = None
        self._what, self._who, self._since, self._expected = "", "", time.monotonic(), 0.0
        self._running: dict[int, tuple[Trial, float]] = {}
        self._finished: list[Trial] = []
        self._begin = time.monotonic()
        self._console = Console(file=stream, highlight=False)
        # Last: Live draws the view once as it is made.
        self._live = Live(
            console=self._console, get_renderable=self._view, refresh_per_second=4, transient=True, screen=False
        )

    def __enter__(self) -> "TerminalListener":
        self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._what = ""
        self._plan = None
        self._live.stop()

    def on_start(self, plan: SearchPlan) -> None:
        self._plan, self._what = plan, ""
        self._finished = list(plan.earlier)
        title, *rest = headline(plan)
        self._console.print(Text(fold(title), style="bold"))
        for line in rest:
            self._console.print(Text(fold(line), style="dim"))
        self._console.print()

    def on_wait(self, what: str) -> None:
        self._what, self._who, self._since, self._expected = what, "", time.monotonic(), 0.0

    def on_trial_start(self, trial: Trial) -> None:
        self._running[trial.number] = trial, time.monotonic()

    def on_trial_end(self, trial: Trial) -> None:
        self._running.pop(trial.number, None)
        self._finished.append(trial)
        line = shortened(trial_line(trial, self._plan, narrow=self._console.width < _NARROW), self._console.width)
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        turn = _turn(done, total)
        self._what = "" if done >= total else f"measuring the leaders again: {turn}"
        self._who = f" ({_numbers(leaders)})"
        self._since, self._expected = time.monotonic(), seconds

    def on_alternate(self, leaders: list[Trial], seconds: float) -> None:
        self._what = "measuring the leaders again in short turns"
        self._who = f" ({_numbers(leaders)})"
        self._since, self._expected = time.monotonic(), seconds

    def on_message(self, message: str) -> None:
        self._console.print(Text(fold(f"note: {message}"), style="yellow"))

    def _view(self) -> Group:
        lines = [Text(fold(f"{self._waited()} ..."), style="cyan")] if self._what else []
        if self._plan is not None:
            lines.append(self._status(self._plan))
            for trial, since in self._running.values():
                spent = words.duration(time.monotonic() - since)
                what = words.difference(trial.config, self._plan.default, self._plan.derived, trial.lossy)
                lines.append(Text(fold(f"trial {trial.number}, {spent}: {what}"), style="dim"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _waited(self) -> str:
        """What is waited for, since when, and how long it will take still."""
        spent = time.monotonic() - self._since
        left = self._expected - spent
        about = (
            f", about {words.duration(left)} left" if left > 0 else ", longer than expected" if self._expected else ""
        )
        return f"{words.duration(spent)} {self._what}{about}{self._who}"

    def _status(self, plan: SearchPlan) -> Text:
        done = len(self._finished)
        of = f" of {plan.trials}" if plan.trials else ""
        status = Text(f"{done}{of} trials", style="bold")
        leader = max((t for t in self._finished if t.ok), key=lambda t: t.throughput, default=None)
        if leader is not None:
            best = speed(leader.throughput, leader.measured.unit)
            status.append(f"  best {best}", style="bold green").append(f" (trial {leader.number})")
        left = self._seconds_left(plan, done)
        if left is not None and not self._what and done != plan.trials:
            status.append(f"  about {words.duration(left)} left", style="dim")
        for name, style in STYLES.items():
            count = sum(trial.measured.status is name for trial in self._finished)
            if count:
                status.append(f"  {count} {name}", style=style)
        return status

    def _seconds_left(self, plan: SearchPlan, done: int) -> float | None:
        limits = []
        if plan.seconds is not None:
            limits.append(plan.seconds - (time.monotonic() - self._begin))
        known = [trial.measured.seconds_total or 0.0 for trial in self._finished]
        if plan.trials is not None and known:
            usual = statistics.mean(known)
            under_way = sum(min(time.monotonic() - since, usual) for _, since in self._running.values())
            limits.append((plan.trials - done) * usual - under_way)
        return max(0.0, min(limits)) if limits else None


def headline(plan: SearchPlan) -> list[str]:
    """What is tuned, on what, out of how many, by whom, and where it is kept."""
    valid = (
        f"{plan.valid:,} valid configurations"
        if plan.valid is not None
        else "more valid configurations than can be counted"
    )
    trials = f", {plan.trials} trials" if plan.trials else ""
    resumed = f", resumed after {plan.done} trials" if plan.done else ""
    lines = [
        f"{plan.name} on {plan.where}: {valid}{trials}",
        f"sampler {plan.sampler}, runner {plan.runner}{resumed}",
    ]
    if plan.folder is not None:
        lines[-1] += f", kept in {plan.folder}"
    return lines


def trial_line(trial: Trial, plan: SearchPlan | None = None, *, narrow: bool = False) -> Text:
    """A finished trial on one line: how it ended, how fast it was, and in what it differs from the default."""
    measured = trial.measured
    # The number that files, logs and the final word call it by; the first is 0.
    line = Text(f"{trial.number:>4}  ")
    line.append(f"{measured.status:<8}", style=STYLES[measured.status])
    line.append(f"{speed(measured.reached, measured.unit) if measured.ok else '':>16}  ")
    if not narrow:
        line.append(f"{words.memory(measured.peak_memory_mib) if measured.peak_memory_mib else '':>10}  ")
    is_default = trial.sampler == "default"
    base = plan.default if plan is not None and not is_default else None
    derived = plan.derived if plan is not None else frozenset()
    what = words.difference(trial.config, base, derived, trial.lossy)
    line.append(fold(f"default: {what}" if is_default else what))
    if measured.reason:
        line.append(f"  ({fold(measured.reason)})", style="dim")
    return line


def shortened(line: Text, width: int) -> Text:
    """A line that fits a width: cut behind a word, not within one, where there is a word to cut behind.

    >>> shortened(Text("0  ok  micro_batch=8 precision=fp32"), 28).plain
    '0  ok  micro_batch=8 …'
    """
    if line.cell_len <= width:
        return line
    end = line.plain.rfind(" ", 0, width - 1)
    if end < width // 2:
        return line
    return line[:end].append(" …")


def _turn(done: int, total: int) -> str:
    """Which turn begins, of how many."""
    return f"turn {done + 1} of {total}"


def _numbers(trials: list[Trial]) -> str:
    many = "s" if len(trials) > 1 else ""
    return f"trial{many} {', '.join(str(trial.number) for trial in trials)}"
