"""Progress of a search: a live view in a terminal, plain lines elsewhere."""

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

from ..results import Trial
from ..results.columns import fold, speed
from ..results.measurement import DEFAULT
from ..tuner.budget import counts
from ..tuner.listener import SearchListener, SearchPlan
from ..views.show import STATUS_STYLES
from . import words

_NARROW = 90
"""Columns of a terminal below which the line of a trial omits its memory."""


def listener_for(stream: TextIO, *, silent: bool) -> "ProgressListener":
    """Returns the listener for a stream."""
    if silent:
        return ProgressListener()
    # A dumb terminal cannot overwrite its output.
    if not stream.isatty():
        return LineListener(stream)
    terminal = cast(TextIO, Terminal(stream))  # other attributes come from the stream
    live = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return TerminalListener(terminal) if live else LineListener(terminal)


class Terminal:
    """A terminal that may be closed: output is then discarded without an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, output: str) -> int:
        with _terminal_may_be_gone():
            self._stream.write(output)
        return len(output)

    def flush(self) -> None:
        with _terminal_may_be_gone():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _terminal_may_be_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class ProgressListener(SearchListener):
    """Prints nothing."""

    _plan: SearchPlan | None = None

    def __enter__(self) -> "ProgressListener":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class LineListener(ProgressListener):
    """Prints one plain line for each event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def on_start(self, plan: SearchPlan) -> None:
        self._plan = plan
        for line in headline(plan):
            self._print(line)

    def on_wait(self, stage: str) -> None:
        self._print(f"{stage} ...")

    def on_trial_end(self, trial: Trial) -> None:
        self._print(trial_line(trial, self._plan).plain)

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        if done < total:
            about = f", about {words.duration(seconds)} left" if seconds else ""
            self._print(f"measuring the leaders again: {_turn(done, total)}{about}: {_numbers(leaders)}")

    def on_message(self, message: str) -> None:
        self._print(f"note: {message}")

    def _print(self, line: str) -> None:
        print(fold(line), file=self._stream, flush=True)


class TerminalListener(ProgressListener):
    """Prints a line for each finished trial, with the current status below.

    Status lines are never wider than the terminal, so that each stays a single line when it is redrawn.
    """

    def __init__(self, stream: TextIO) -> None:
        self._doing, self._trials, self._since, self._expected = "", "", time.monotonic(), 0.0
        self._running: dict[int, tuple[Trial, float]] = {}
        self._finished: list[Trial] = []
        self._begin = time.monotonic()
        self._console = Console(file=stream, highlight=False)
        # After the other attributes: the constructor of Live draws the view once, which reads them.
        self._live = Live(
            console=self._console, get_renderable=self._view, refresh_per_second=4, transient=True, screen=False
        )

    def __enter__(self) -> "TerminalListener":
        self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._doing = ""
        self._plan = None
        self._live.stop()

    def on_start(self, plan: SearchPlan) -> None:
        self._plan, self._doing = plan, ""
        self._finished = list(plan.earlier)
        title, *details = headline(plan)
        self._console.print(Text(fold(title), style="bold"))
        for line in details:
            self._console.print(Text(fold(line), style="dim"))
        self._console.print()

    def on_wait(self, stage: str) -> None:
        self._doing, self._trials, self._since, self._expected = stage, "", time.monotonic(), 0.0

    def on_trial_start(self, trial: Trial) -> None:
        self._running[trial.number] = trial, time.monotonic()

    def on_trial_end(self, trial: Trial) -> None:
        self._running.pop(trial.number, None)
        self._finished.append(trial)
        line = trial_line(trial, self._plan, narrow=self._console.width < _NARROW)
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        turn = _turn(done, total)
        self._doing = "" if done >= total else f"measuring the leaders again: {turn}"
        self._trials = f" ({_numbers(leaders)})"
        self._since, self._expected = time.monotonic(), seconds

    def on_message(self, message: str) -> None:
        self._console.print(Text(fold(f"note: {message}"), style="yellow"))

    def _view(self) -> Group:
        lines = [Text(fold(f"{self._waited()} ..."), style="cyan")] if self._doing else []
        if self._plan is not None:
            lines.append(self._status(self._plan))
            for trial, since in self._running.values():
                spent = words.duration(time.monotonic() - since)
                changes = words.difference(trial.config, self._plan.default, self._plan.derived, trial.lossy)
                lines.append(Text(fold(f"trial {trial.number}, {spent}: {changes}"), style="dim"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _waited(self) -> str:
        """Returns the current wait with its elapsed and remaining time."""
        spent = time.monotonic() - self._since
        remaining = self._expected - spent
        about = (
            f", about {words.duration(remaining)} left"
            if remaining > 0
            else ", longer than expected"
            if self._expected
            else ""
        )
        return f"{words.duration(spent)} {self._doing}{about}{self._trials}"

    def _status(self, plan: SearchPlan) -> Text:
        done = sum(map(counts, self._finished))
        of = f" of {plan.trials}" if plan.trials else ""
        status = Text(f"{done}{of} trials", style="bold")
        leader = max((t for t in self._finished if t.ok), key=lambda t: t.throughput, default=None)
        if leader is not None:
            best = speed(leader.throughput, leader.measured.unit)
            status.append(f"  best {best}", style="bold green").append(f" (trial {leader.number})")
        seconds_left = self._seconds_left(plan, done)
        if seconds_left is not None and not self._doing and done != plan.trials:
            status.append(f"  about {words.duration(seconds_left)} left", style="dim")
        for name, style in STATUS_STYLES.items():
            count = sum(trial.measured.status is name for trial in self._finished)
            if count:
                status.append(f"  {count} {name}", style=style)
        return status

    def _seconds_left(self, plan: SearchPlan, done: int) -> float | None:
        limits = []
        if plan.seconds is not None:
            limits.append(plan.seconds - (time.monotonic() - self._begin))
        trial_seconds = [trial.measured.seconds_total or 0.0 for trial in self._finished if counts(trial)]
        if plan.trials is not None and trial_seconds:
            usual = statistics.mean(trial_seconds)
            under_way = sum(min(time.monotonic() - since, usual) for _, since in self._running.values())
            limits.append((plan.trials - done) * usual - under_way)
        return max(0.0, min(limits)) if limits else None


def headline(plan: SearchPlan) -> list[str]:
    """Returns the target, the devices, the number of configurations, the sampler and the folder."""
    valid = (
        f"{plan.valid:,} valid configuration{'s'[: plan.valid != 1]}"
        if plan.valid is not None
        else "more valid configurations than can be counted"
    )
    trials = ""
    if plan.trials:
        most = plan.trials if plan.valid is None else min(plan.trials, plan.valid)
        trials = f", {most} trial{'s'[: most != 1]}"
    resumed = f", resumed after {plan.done} trials" if plan.done else ""
    lines = [
        f"{plan.name}{f' ({plan.model_class})' if plan.model_class else ''} on {plan.where}: {valid}{trials}",
        f"sampler {plan.sampler}, runner {plan.runner}{resumed}",
    ]
    if plan.folder is not None:
        lines[-1] += f", saved in {plan.folder}"
    return lines


def trial_line(trial: Trial, plan: SearchPlan | None = None, *, narrow: bool = False) -> Text:
    """Returns a finished trial as one line: its status, its speed, and its differences from the default."""
    measured = trial.measured
    # The number used in files, logs and the result; the first is 0.
    line = Text(f"{trial.number:>4}  ")
    line.append(f"{measured.status:<8}", style=STATUS_STYLES[measured.status])
    line.append(f"{speed(measured.reached, measured.unit) if measured.ok else '':>16}  ")
    if not narrow:
        line.append(f"{words.memory(measured.peak_memory_mib) if measured.peak_memory_mib else '':>10}  ")
    is_default = trial.sampler == DEFAULT
    base = plan.default if plan is not None and not is_default else None
    derived = plan.derived if plan is not None else frozenset()
    changes = words.difference(trial.config, base, derived, trial.lossy)
    line.append(fold(f"default: {changes}" if is_default else changes))
    if measured.reason:
        line.append(f"  ({fold(measured.reason)})", style="dim")
    return line


def _turn(done: int, total: int) -> str:
    """Returns the number of the next turn and their total."""
    return f"turn {done + 1} of {total}"


def _numbers(trials: list[Trial]) -> str:
    plural = "s" if len(trials) > 1 else ""
    return f"trial{plural} {', '.join(str(trial.number) for trial in trials)}"
