"""A run as people read it in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import summary
from .columns import cell, fold, number
from .measurement import Status, Trial
from .run import RunFolder
from .view import View

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {
    Status.OK: "green",
    Status.OOM: "yellow",
    Status.TIMEOUT: "magenta",
    Status.CRASH: "red",
    Status.WRONG: "red",
    Status.SKIPPED: "dim",
}


def render(run: RunFolder | View, console: "Console", *, top: int | None = 20) -> None:
    """Prints a run: its winner, the counts by status, and its trials, fastest first and then the failures.

    On a terminal the table is drawn; otherwise its columns are separated by at least two spaces, one line a
    trial, nothing cut off.

    Args:
        run: the run.
        console: where to print.
        top: rows at most; None for all.
    """
    from rich.text import Text

    trials = run.trials()
    for line in [*_head(run), *_outcome(trials)]:
        console.print(Text(line), soft_wrap=not console.is_terminal)
    rows = _ordered(trials)
    shown = rows if top is None else rows[:top]
    if not shown:
        return
    console.print()
    columns, common = _columns(shown)
    if console.is_terminal:
        _draw(shown, columns, console)
    else:
        _write(shown, columns, console)
    if common:
        console.print(Text("the same in all: " + ", ".join(common)), soft_wrap=not console.is_terminal)
    if len(shown) < len(rows):
        console.print(
            Text(f"{len(rows) - len(shown)} more; all are in {run.path / 'trials.csv'}"), soft_wrap=True
        )


def _head(run: RunFolder | View) -> list[str]:
    document = run.document or {}
    asked = document.get("asked", {})
    what = [str(asked[key]) for key in ("model",) if asked.get(key)]
    what += [
        f"{key} {asked[key]}"
        for key in ("seq_len", "global_batch", "sampler", "seed")
        if asked.get(key) is not None
    ]
    head = [f"{run.path}: {', '.join(what)}" if what else f"{run.path}"]
    return head + [f"note: {fold(each)}" for each in getattr(run, "problems", ())]


def _outcome(trials: Sequence[Trial]) -> list[str]:
    found = [f"{count} {status}" for status, count in summary.counts(trials).items() if count]
    pending = sum(trial.pending for trial in trials)
    counts = f"{len(trials)} trials: {', '.join([*found, *([f'{pending} pending'] if pending else [])])}"
    winner, base = summary.best(trials), summary.default(trials)
    if winner is None:
        return [counts if trials else "no trials yet", fold(summary.why_nothing(trials))]
    lines = [counts, f"best: trial {winner.number}, {_speed(winner)}"]
    gain = summary.gain(trials)
    if base is not None and base.number == winner.number:
        lines[-1] += ", the default configuration"
    elif gain is not None:
        lines[-1] += f", {gain:.2f} times the default configuration's {_speed(base)} (trial {base.number})"
    elif base is not None and not base.pending and not base.ok:
        lines[-1] += f"; the default configuration (trial {base.number}) ended as {base.measurement.status}"
    if winner.remeasured:
        again = ", ".join(number(each, 5) for each in winner.remeasured)
        lines.append(f"measured again: {again}; the first time {number(winner.measurement.throughput, 5)}")
    lines.append(
        "configuration: "
        + ", ".join(f"{name}={cell(value, 'knob.')}" for name, value in winner.config.items())
    )
    return lines


def _speed(trial: Trial) -> str:
    return f"{number(summary.standing(trial), 5)} {trial.measurement.unit}".rstrip()


def _ordered(trials: Sequence[Trial]) -> list[Trial]:
    failed = [trial for trial in trials if not trial.pending and not trial.ok]
    return [*summary.leaders(trials), *failed, *(trial for trial in trials if trial.pending)]


def _columns(trials: Sequence[Trial]) -> tuple[list[tuple[str, list[str], str]], list[str]]:
    """Columns as (name, cells, `left` or `right`), and `knob=value` of the knobs that are the same in all."""
    finished = [None if trial.pending else trial.measurement for trial in trials]

    def measured(field: str, digits: int) -> list[str]:
        given = [None if each is None else getattr(each, field) for each in finished]
        return ["" if value is None else number(value, digits) for value in given]

    unit = next((each.unit for each in finished if each is not None and each.unit), "throughput")
    columns = [
        ("trial", [str(trial.number) for trial in trials], "right"),
        ("status", ["pending" if each is None else str(each.status) for each in finished], "left"),
        (
            unit,
            ["" if summary.standing(each) is None else number(summary.standing(each), 5) for each in trials],
            "right",
        ),
        ("step ms", measured("step_ms", 4), "right"),
        ("peak MiB", measured("peak_memory_mib", 5), "right"),
    ]
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    common = []
    for name in names:
        cells = [cell(trial.config[name], "knob.") if name in trial.config else "-" for trial in trials]
        if len(trials) > 1 and len(set(cells)) == 1:
            common.append(f"{name}={cells[0]}")
        else:
            columns.append((name, cells, "right" if _numeric(trials, name) else "left"))
    columns.append(("sampler", [trial.sampler for trial in trials], "left"))
    columns.append(("reason", ["" if each is None else fold(each.reason) for each in finished], "left"))
    return [each for each in columns if any(each[1])], common


def _numeric(trials: Sequence[Trial], name: str) -> bool:
    return all(isinstance(trial.config.get(name, 0), (int, float)) for trial in trials)


def _draw(trials: Sequence[Trial], columns: Sequence[tuple[str, list[str], Any]], console: "Console") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, _, side in columns:
        wraps = name == "reason"
        drawn.add_column(
            Text(name), justify=side, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis"
        )
    for i, trial in enumerate(trials):
        style = "" if trial.pending else _COLOURS[trial.measurement.status]
        drawn.add_row(
            *(Text(cells[i], style=style if name == "status" else "") for name, cells, _ in columns)
        )
    console.print(drawn)


def _write(
    trials: Sequence[Trial], columns: Sequence[tuple[str, list[str], Any]], console: "Console"
) -> None:
    from rich.text import Text

    widths = [max(len(name), *map(len, cells)) for name, cells, _ in columns]
    for i in range(-1, len(trials)):
        texts = [name if i < 0 else cells[i] for name, cells, _ in columns]
        line = "  ".join(
            text.rjust(width) if side == "right" else text.ljust(width)
            for text, width, (_, _, side) in zip(texts, widths, columns)
        )
        console.print(Text(line.rstrip()), soft_wrap=True)
