"""Output of a run in a terminal, and in a notebook."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from ..results import listing, summary
from ..results.columns import fold, knob_text, number, speed
from ..results.measurement import Status, Trial
from ..results.names import RUNNING, STOPPED
from ..results.run import RunFolder, View

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STATUS_STYLES = {
    Status.OK: "green",
    Status.OOM: "yellow",
    Status.TIMEOUT: "magenta",
    Status.CRASH: "red",
    Status.WRONG: "red",
    Status.SKIPPED: "dim",
}
"""Style of each status in a terminal."""

SIMULATED = "simulated, nothing was run"
"""Text shown with every simulated run."""
EMULATED = "emulated, some ranks ran alone on one device"
"""Text shown with every emulated run."""

TOP = 20
"""Number of trials that are shown."""
_SHOWN_REASON = 300  # characters
ROWS = 10
"""Largest number of trials in the table of a notebook."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its name, its cells and their alignment."""

    name: str
    cells: list[str]
    side: Literal["left", "right"] = "left"

    def __post_init__(self) -> None:
        # Both may come from an untrusted folder.
        object.__setattr__(self, "name", fold(self.name))
        object.__setattr__(self, "cells", [fold(content) for content in self.cells])


def render(run: RunFolder | View, console: "Console", *, top: int | None = TOP, statuses: Sequence[str] = ()) -> None:
    """Prints a run: its winner, the counts by status, and its trials: the fastest first, failures last.

    On a terminal the table is drawn with the reasons below it. Elsewhere a trial is one line, its cells are separated
    by at least two spaces and nothing is cut off.

    Args:
        run: the run.
        console: where to print.
        top, statuses: the trials, as of `listing.select`.

    Raises:
        UsageError: a status is unknown.
    """
    from rich.text import Text

    trials = run.trials()
    picked, cut_off = listing.select(trials, top=top, statuses=statuses)
    for line in [*_head(run), *_outcome(trials)]:
        console.print(Text(fold(line)), soft_wrap=not console.is_terminal)
    if not picked:
        return
    console.print()
    outcome, knobs, common = _columns(picked)
    if console.is_terminal:
        _draw(picked, outcome, knobs, console)
    else:
        _write(picked, [*outcome, *knobs], console)
    if common:
        console.print(Text(fold("the same in all: " + ", ".join(common))), soft_wrap=not console.is_terminal)
    again = [str(trial.number) for trial in picked if trial.remeasured]
    if again:
        many = len(again) > 1
        sentence = f"trial{'s' if many else ''} {', '.join(again)} {'were' if many else 'was'} measured again"
        console.print(Text(f"{sentence}: they are listed first, by the median"), soft_wrap=not console.is_terminal)
    if cut_off:
        console.print(Text(f"{cut_off} more; all are in {run.path / 'trials.csv'}"), soft_wrap=True)


def _head(run: RunFolder | View) -> list[str]:
    document = run.document or {}
    request = document.get("asked", {})
    facts = [str(request["model"])] if request.get("model") else []
    if facts and (workload := request.get("workload")) and workload.get("class"):
        facts[0] += f" ({workload['class']})"
    facts += [
        f"{key} {request[key]}"
        for key in ("seq_len", "global_batch", "sampler", "seed")
        if request.get(key) is not None
    ]
    head = [f"{run.path}: {', '.join(facts)}" if facts else f"{run.path}"]
    if request.get("simulated"):
        head.append(f"{SIMULATED}: these are predictions for {_machine(request)}")
    if request.get("emulated"):
        head.append(f"{EMULATED}; communication is priced for {_machine(request)}")
    if request.get("first_trial"):
        head.append(fold(str(request["first_trial"])))
    if isinstance(run, View) and (line := _state(run)):
        head.append(line)
    return head + [f"note: {fold(problem)}" for problem in getattr(run, "problems", ())]


def _state(run: View) -> str | None:
    """Returns a line for a run that is running or was stopped; None for any other run."""
    if run.state == RUNNING:
        return "running"
    if run.state != STOPPED:
        return None
    again = (run.document or {}).get("asked", {}).get("request")
    return "stopped" + (f": `redline tune --out {shlex.quote(str(run.path))} --resume` continues it" if again else "")


def _machine(request: Mapping[str, Any]) -> str:
    devices = request.get("devices")
    if devices is None:
        return "hardware that is not named"
    return f"{devices.get('used', '?')} x {devices.get('name', '?')}"


def _outcome(trials: Sequence[Trial]) -> list[str]:
    by_status = [f"{count} {status}" for status, count in summary.counts(trials).items() if count]
    pending = sum(trial.pending for trial in trials)
    counts = f"{len(trials)} trials: {', '.join([*by_status, *([f'{pending} pending'] if pending else [])])}"
    winner, base = summary.best(trials), summary.default(trials)
    if winner is None:
        return [counts if trials else "no trials yet", fold(summary.why_nothing(trials))]
    lines = [counts, f"best: trial {winner.number}, {speed_of(winner)}"]
    gain = summary.gain(trials)
    if base is not None and base.number == winner.number:
        reason = summary.only_default(trials)
        lines[-1] += f", the default configuration{f': {reason}' if reason else ''}"
    elif base is not None and gain is not None:
        lines[-1] += (
            f"; the default configuration (trial {base.number}): {speed_of(base)}; {'gain ' if gain.shown else ''}{gain}"
        )
    elif base is not None and not base.pending and not base.ok:
        lines[-1] += f"; the default configuration (trial {base.number}) ended as {base.measured.status}"
    if winner.remeasured and winner.first is not None:
        again = ", ".join(number(throughput, 5) for throughput in winner.remeasured)
        lines.append(f"measured again: {again}; the first time {number(winner.first, 5)}")
    if winner.measured.unconfirmed:
        lines.append(f"unconfirmed: {fold(winner.measured.unconfirmed)}")
    lines.append("configuration: " + ", ".join(f"{name}={knob_text(winner, name)}" for name in winner.config))
    if winner.lossy:
        lines.append(f"{summary.exactness(trials)}: {_exact(summary.best_exact(trials), winner)}")
    return lines


def _exact(trial: Trial | None, winner: Trial) -> str:
    """Returns the best trial without lossy values: its speed and its differences from the winner."""
    if trial is None:
        return "none succeeded"
    fastest = winner.throughput
    ratio = trial.throughput / fastest if fastest else 1.0
    differing = ", ".join(
        f"{name}={knob_text(trial, name)}" for name in trial.config if trial.config[name] != winner.config.get(name)
    )
    return f"trial {trial.number}, {speed_of(trial)}, {ratio:.2f} times the best; {differing}"


def speed_of(trial: Trial) -> str:
    """Returns the speed of a trial and its uncertainty."""
    measured = trial.measured
    doubt = "" if measured.spread is None else f" ± {100 * measured.spread:.2g} %"
    return speed(trial.throughput, measured.unit) + doubt


def _columns(trials: Sequence[Trial]) -> tuple[list[Column], list[Column], list[str]]:
    """Returns the columns of the outcome, those of the knobs that differ, and `knob=value` of those that do not."""
    finished = [None if trial.pending else trial.measurement for trial in trials]

    def measured(field: str, digits: int) -> list[str]:
        values = [None if measurement is None else getattr(measurement, field) for measurement in finished]
        return ["" if value is None else number(value, digits) for value in values]

    unit = next(
        (measurement.unit for measurement in finished if measurement is not None and measurement.unit), "throughput"
    )
    speeds = [trial.throughput if trial.ok else None for trial in trials]
    outcome = [
        Column("trial", [str(trial.number) for trial in trials], "right"),
        Column("status", ["pending" if measurement is None else str(measurement.status) for measurement in finished]),
        Column(unit, ["" if throughput is None else number(throughput, 5) for throughput in speeds], "right"),
        Column("step ms", measured("step_ms", 4), "right"),
        Column("peak MiB", measured("peak_memory_mib", 5), "right"),
        Column("sampler", [trial.sampler for trial in trials]),
    ]
    knobs, common = [], []
    for name in dict.fromkeys(name for trial in trials for name in trial.config):
        cells = [knob_text(trial, name) if name in trial.config else "-" for trial in trials]
        if len(trials) > 1 and len(set(cells)) == 1:
            common.append(f"{name}={cells[0]}")
        else:
            numeric = all(isinstance(trial.config.get(name, 0), (int, float)) for trial in trials)
            knobs.append(Column(name, cells, "right" if numeric else "left"))
    return [column for column in outcome if any(column.cells)], knobs, common


def _draw(trials: Sequence[Trial], outcome: Sequence[Column], knobs: Sequence[Column], console: "Console") -> None:
    from rich.measure import Measurement as Measure
    from rich.text import Text

    drawn = _table(trials, [*outcome, *knobs])
    too_wide = Measure.get(console, console.options.update(max_width=10**6), drawn).maximum > console.width
    if too_wide and knobs:
        points = [" ".join(f"{knob.name}={knob.cells[i]}" for knob in knobs) for i in range(len(trials))]
        narrow = [column for column in outcome if column.name not in ("step ms", "sampler")]
        drawn = _table(trials, [*narrow, Column("configuration", points)])
    console.print(drawn)
    by_reason: dict[tuple[Status, str], list[int]] = {}
    for trial in trials:
        if not trial.pending and trial.measured.reason:
            key = trial.measured.status, fold(trial.measured.reason)
            by_reason.setdefault(key, []).append(trial.number)
    for (status, reason), numbers in by_reason.items():
        which = f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        reason = reason if len(reason) <= _SHOWN_REASON else reason[: _SHOWN_REASON - 1] + "…"
        console.print(Text.assemble((str(status), STATUS_STYLES[status]), f" ({which}): {reason}"))


def _table(trials: Sequence[Trial], columns: Sequence[Column]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        # One word a line, so that a column is as narrow as its cells.
        heading = Text(column.name.replace("_", "\n").replace(" ", "\n"))
        drawn.add_column(heading, justify=column.side, no_wrap=column.name != "configuration")
    for i, trial in enumerate(trials):
        style = "" if trial.pending else STATUS_STYLES[trial.measured.status]
        drawn.add_row(*(Text(column.cells[i], style=style if column.name == "status" else "") for column in columns))
    return drawn


def _write(trials: Sequence[Trial], columns: Sequence[Column], console: "Console") -> None:
    from rich.text import Text

    failure_reasons = ["" if trial.pending else fold(trial.measured.reason) for trial in trials]
    columns = [*columns, Column("reason", failure_reasons)] if any(failure_reasons) else columns
    for i in range(-1, len(trials)):
        texts = []
        for column in columns:
            width = max(len(column.name), *map(len, column.cells))
            content = column.name if i < 0 else column.cells[i]
            texts.append(content.rjust(width) if column.side == "right" else content.ljust(width))
        console.print(Text("  ".join(texts).rstrip()), soft_wrap=True)


def html(trials: Sequence[Trial], *, reason: str = "") -> str:
    """Returns the winner and the leaders for a notebook. Everything that comes from a trial is escaped.

    Args:
        trials: the trials.
        reason: why there is no winner; empty for the reason by the trials.
    """
    lines = _outcome(trials)
    if summary.best(trials) is None:
        lines = [f"no winner, so best is None: {fold(reason) or lines[1]}", lines[0]]
    picked, cut_off = listing.select(trials, top=ROWS)
    outcome, knobs, common = _columns(picked)
    if common:
        lines.append("the same in all: " + ", ".join(common))
    columns = [*outcome, *knobs] if picked else []
    head = "".join(f"<th>{escape(column.name)}</th>" for column in columns)
    rows = zip(*(column.cells for column in columns), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{escape(content)}</td>' for content in row)}</tr>" for row in rows)
    more = f"<p>{cut_off} more in .trials</p>" if cut_off else ""
    return (
        f"<div><p>{'<br/>'.join(map(escape, lines))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )
