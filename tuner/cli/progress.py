"""What a person sees while a search runs: a live view on a terminal, plain lines elsewhere."""

import statistics
import time
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...results import Status, Trial
from ...results.columns import speed
from ..listener import SearchListener, SearchPlan
from ..result import Candidate, Result

_STYLES = {
    Status.OK: "green",
    Status.OOM: "yellow",
    Status.TIMEOUT: "magenta",
    Status.CRASH: "red",
    Status.WRONG: "red",
    Status.SKIPPED: "dim",
}


def listener_for(stream: TextIO, *, silent: bool) -> "ProgressListener":
    """The listener that suits the stream."""
    if silent:
        return ProgressListener()
    return TerminalListener(stream) if stream.isatty() else LineListener(stream)


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

    def began(self, plan: SearchPlan) -> None:
        self._print(headline(plan))

    def waiting(self, what: str) -> None:
        self._print(f"{what} ...")

    def finished(self, trial: Trial) -> None:
        self._print(trial_line(trial).plain)

    def remeasuring(self, leaders: list[Trial], done: int, total: int) -> None:
        if done == 0:
            numbers = ", ".join(str(trial.number) for trial in leaders)
            self._print(f"measuring the leaders again, in turns: trials {numbers}")

    def said(self, message: str) -> None:
        self._print(f"note: {message}")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalListener(ProgressListener):
    """A line for each finished trial, and below them what is going on."""

    def __init__(self, stream: TextIO) -> None:
        self._plan: SearchPlan | None = None
        self._what = ""
        self._running: dict[int, Trial] = {}
        self._finished: list[Trial] = []
        self._console = Console(file=stream, highlight=False)
        # Last: Live draws the view once as it is made.
        self._live = Live(
            console=self._console, get_renderable=self._view, refresh_per_second=4, transient=True, screen=False
        )
        self._begin = time.monotonic()

    def __enter__(self) -> "TerminalListener":
        self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._what = ""
        self._plan = None
        self._live.stop()

    def began(self, plan: SearchPlan) -> None:
        self._plan, self._what = plan, ""
        self._console.print(Text(headline(plan), style="bold"))

    def waiting(self, what: str) -> None:
        self._what = what

    def started(self, trial: Trial) -> None:
        self._running[trial.number] = trial

    def finished(self, trial: Trial) -> None:
        self._running.pop(trial.number, None)
        self._finished.append(trial)
        self._console.print(trial_line(trial), no_wrap=True, overflow="ellipsis")

    def remeasuring(self, leaders: list[Trial], done: int, total: int) -> None:
        self._what = f"measuring the leaders again, in turns: {done} of {total}" if done < total else ""

    def said(self, message: str) -> None:
        self._console.print(Text(f"note: {message}", style="yellow"))

    def _view(self) -> Group | Text:
        lines = [Text(f"{self._what} ...", style="cyan")] if self._what else []
        if self._plan is None:
            return Group(*lines)
        done = self._plan.done + len(self._finished)
        status = Text(f"{done}{f' of {self._plan.trials}' if self._plan.trials else ''} trials done", style="bold")
        for name, style in _STYLES.items():
            count = sum(trial.measurement.status is name for trial in self._finished)
            if count:
                status.append(f"  {name} {count}", style=style)
        leader = max((t for t in self._finished if t.ok), key=lambda t: t.measurement.throughput, default=None)
        if leader is not None:
            status.append(f"  best {speed(leader.measurement.throughput, leader.measurement.unit)}", style="bold green")
            status.append(f" (trial {leader.number})")
        left = self._seconds_left(done)
        if left is not None:
            status.append(f"  about {duration(left)} left", style="dim")
        lines.append(status)
        for trial in self._running.values():
            lines.append(Text(f"running {trial.number}: {words(trial)}", style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*lines)

    def _seconds_left(self, done: int) -> float | None:
        limits = []
        if self._plan.seconds is not None:
            limits.append(self._plan.seconds - (time.monotonic() - self._begin))
        known = [trial.measurement.seconds_total or 0.0 for trial in self._finished]
        if self._plan.trials is not None and known:
            limits.append((self._plan.trials - done) * statistics.mean(known))
        return max(0.0, min(limits)) if limits else None


def headline(plan: SearchPlan) -> str:
    """What is tuned, on what, out of how many, by whom."""
    valid = f"{plan.valid:,} valid configurations" if plan.valid is not None else "more valid configurations than can be counted"
    trials = f", {plan.trials} trials" if plan.trials else ""
    resumed = f", resumed after {plan.done} trials" if plan.done else ""
    return f"{plan.name} on {plan.where}: {valid}{trials}, sampler {plan.sampler}, runner {plan.runner}{resumed}"


def words(trial: Trial) -> str:
    """A trial's knobs on one line."""
    return " ".join(f"{name}={_value(value)}" for name, value in trial.config.items())


def trial_line(trial: Trial) -> Text:
    """A finished trial on one line."""
    measured = trial.measurement
    # The number that files, logs and the final word call it by; the first is 0.
    line = Text(f"{trial.number:>4}  ")
    line.append(f"{measured.status:<8}", style=_STYLES[measured.status])
    memory = f"{measured.peak_memory_mib:,.0f} MiB" if measured.peak_memory_mib else ""
    if measured.ok:
        line.append(f"{speed(measured.throughput, measured.unit):>20}  {memory:>11}  ")
    line.append(words(trial))
    if measured.reason:
        line.append(f"  ({measured.reason})", style="dim")
    return line


def duration(seconds: float) -> str:
    """`1:05` or `1:00:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_result(result: Result) -> None:
    """The final word of a search."""
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    if result.interrupted:
        resume = f" Go on with --resume --out {result.folder}." if result.folder else ""
        console.print(f"Interrupted; what was found so far is kept.{resume}", style="yellow")
    elif result.ended:
        console.print(f"Done: {result.ended}.", style="dim")
    if result.best is None:
        console.print(f"Nothing feasible: {result.why}", style="bold red")
    else:
        console.print(f"winner   {_said(result.best)}", style="bold green")
        for name, value in result.best.config.items():
            console.print(f"           {name} = {_value(value)}")
        if result.default is not None:
            console.print(f"default  {_said(result.default)}")
            if result.gain is not None:
                same = " (the default configuration is the winner)" if result.best == result.default else ""
                console.print(f"gain     {result.gain:.2f}x{same}", style="bold")
        else:
            console.print(f"default  {_default_failed(result)}")
    if result.folder is not None:
        console.print("wrote    " + _files(result))


def _files(result: Result) -> str:
    names = ["best.yaml", "trials.csv", "run.yaml", "study.log", "logs/"]
    return ", ".join(str(result.folder / name) for name in names if (result.folder / name).exists())


def _said(candidate: Candidate) -> str:
    measured = candidate.measurement
    parts = [f"{speed(candidate.throughput, measured.unit):>20}"]
    if measured.spread is not None:
        parts.append(f"± {100 * measured.spread:.2g} %")
    if measured.step_ms:
        parts.append(f"step {measured.step_ms:,.1f} ms")
    if measured.peak_memory_mib:
        parts.append(f"peak {measured.peak_memory_mib:,.0f} MiB")
    if measured.mfu:
        parts.append(f"MFU {measured.mfu:.0%}")
    again = len(candidate.trial.remeasured)
    parts.append(f"trial {candidate.trial.number}" + (f", median of {again} re-measurements" if again else ""))
    return "  ".join(parts)


def _default_failed(result: Result) -> str:
    trial = next((each for each in result.all_trials if each.sampler == "default"), None)
    if trial is None or trial.pending:
        return "not measured"
    return f"{trial.measurement.status} ({trial.measurement.reason})"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
