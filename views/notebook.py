"""HTML of a run for notebooks."""

from collections.abc import Sequence
from html import escape

from ..results import listing, summary
from ..results.columns import cell, fold, knob_text, number, speed, value
from ..results.measurement import Status, Trial

COLOURS = {
    Status.OK: "#2a9d5c",
    Status.OOM: "#d98e04",
    Status.TIMEOUT: "#9b5de5",
    Status.CRASH: "#d1495b",
    Status.WRONG: "#8d0801",
    Status.SKIPPED: "#8a8f98",
}
ROWS = 10
"""Largest number of trials in the table of a notebook."""
_WIDTH, _HEIGHT, _MARGIN = 640, 150, 8


def html(trials: Sequence[Trial], *, reason: str = "") -> str:
    """Returns the winner, a plot of the throughput of every trial and of the best so far, and the ten fastest trials.

    Everything that comes from a trial is escaped. The colours follow the light or dark theme of the page.
    """
    winner = summary.best(trials)
    head = f"<b>no winner</b>, so <code>best</code> is None: {escape(reason or summary.why_nothing(trials))}"
    if winner is not None:
        gain = summary.gain(trials)
        speed_text = speed(winner.throughput, winner.measured.unit)
        head = f"<b>{escape(speed_text)}</b> (trial {winner.number}" + (
            f"; {'gain over the default configuration: ' if gain.shown else ''}{escape(str(gain))})" if gain else ")"
        )
        if winner.measured.unconfirmed:
            head += f"<br/>unconfirmed: {escape(winner.measured.unconfirmed)}"
        if winner.lossy:
            exact = summary.best_exact(trials)
            speed_text = f"{speed(exact.throughput, exact.measured.unit)} (trial {exact.number})" if exact else "none"
            head += f"<br/>{escape(summary.exactness(trials))}: {escape(speed_text)}"
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts(trials).items() if count)
    counts = summary.failures(trials) or counts
    return (
        f"<div><p>{head}<br/><small>{len(trials)} trials: {escape(counts)}</small></p>"
        f"{drawing(trials)}{table(trials)}</div>"
    )


def drawing(trials: Sequence[Trial]) -> str:
    """Returns an SVG with a point for each finished trial at its throughput (failures at the bottom) and the best so
    far.
    """
    finished = [trial for trial in trials if not trial.pending]
    speeds = [trial.throughput for trial in finished if trial.ok]
    if len(finished) < 2 or not speeds:
        return ""
    top = max(speeds)

    def x(place: int) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * place / (len(finished) - 1)

    def y(throughput: float | None) -> float:
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (throughput or 0.0) / (top or 1.0)

    points = "".join(
        f'<circle cx="{x(i):.1f}" cy="{y(trial.throughput if trial.ok else None):.1f}" r="3" '
        f'fill="{COLOURS[trial.measured.status]}"><title>{escape(_title(trial))}</title></circle>'
        for i, trial in enumerate(finished)
    )
    best = summary.best_so_far(finished)
    steps = " ".join(f"{x(i):.1f},{y(throughput):.1f}" for i, throughput in enumerate(best) if throughput is not None)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        'aria-label="throughput of each trial, and the best so far" style="max-width:100%">'
        f'<polyline points="{steps}" fill="none" stroke="{COLOURS[Status.OK]}" stroke-opacity="0.5" '
        f'stroke-width="2"/>{points}</svg>'
    )


def table(trials: Sequence[Trial], rows: int = ROWS) -> str:
    """The leaders and then the failures, `rows` at most, with the knobs that differ."""
    chosen, cut_off = listing.select(trials, listing.Selection(top=rows))
    if not chosen:
        return ""
    knobs = [
        name
        for name in listing.knob_names(chosen)
        if len({cell(trial.config.get(name), "knob.") for trial in chosen}) > 1 or len(chosen) == 1
    ]
    columns = ["trial", "status", "throughput", "step_ms", "peak_memory_mib"]
    head = "".join(f"<th>{escape(name)}</th>" for name in [*columns, *knobs])
    lines = []
    for trial in chosen:
        cells = [_short(trial, name) for name in columns]
        cells += [knob_text(trial, name) for name in knobs]
        lines.append("<tr>" + "".join(f"<td>{escape(content)}</td>" for content in cells) + "</tr>")
    footer = f"<small>{cut_off} more in .trials</small>" if cut_off else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{footer}"


def _title(trial: Trial) -> str:
    knobs = ", ".join(f"{name}={knob_text(trial, name)}" for name in trial.config)
    speed_text = f"{number(trial.throughput, 5)} {trial.measured.unit}" if trial.ok else ""
    reason = fold(trial.measured.reason)[:200]
    return ", ".join(
        detail
        for detail in (f"trial {trial.number}", str(trial.measured.status), speed_text.strip(), knobs, reason)
        if detail
    )


def _short(trial: Trial, name: str) -> str:
    plain_value = value(trial, name)
    return number(plain_value, 5) if isinstance(plain_value, float) else cell(plain_value, name)
