"""Output of the result of a search: the winner beside the default configuration, and the next commands."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.reading import tail_inside
from ..knobs.text import marked_text
from ..results import summary
from ..results.columns import fold, speed
from ..results.measurement import DEFAULT, Status
from ..results.storage import without_password
from ..tuner.result import Candidate, Result
from ..views.show import speed_of
from . import words

LOG_LINES = 6
"""Last lines of a failed trial's log that are shown."""


def print_result(result: Result, *, of_command: bool = False, storage: str | None = None) -> None:
    """Prints the result of a search, as wide as the terminal.

    Args:
        result: the result.
        of_command: True if a command was tuned.
        storage: URL of the ledger, if it is not in the folder.
    """
    console = Console(highlight=False)
    console.print()
    if result.interrupted:
        console.print(Text("Interrupted; the results so far are kept.", style="yellow"))
    elif result.ended:
        console.print(Text(f"Done: {result.ended}.", style="dim"))
    if result.best is None:
        reason = summary.fails_everywhere(result.all_trials)
        target = "command" if of_command else "model"
        why = f"Your {target} fails in every configuration: {reason}" if reason else f"Nothing feasible: {result.why}"
        console.print(Text(fold(why), style="bold red"))
    else:
        _winner(result, result.best, console)
    if result.folder is not None:
        names = ["best.yaml", "trials.csv", "run.yaml", "study.log", "logs"]
        existing = [name for name in names if (result.folder / name).exists() and (name != "best.yaml" or result.best)]
        console.print(Text(f"wrote    {result.folder}: {', '.join(existing)}"), soft_wrap=True)
        for line in _next_commands(result, of_command, storage):
            console.print(Text(line, style="dim"), soft_wrap=True)


def _winner(result: Result, best: Candidate, console: Console) -> None:
    default = result.default
    kind = " (emulated on one device)" if result.emulated else ""
    gain = summary.gain(result.all_trials)
    unconfirmed = best.measurement.unconfirmed
    kind += ", unconfirmed" if unconfirmed else ""
    hero = "bold green" if not unconfirmed and (gain is None or gain.shown) else "bold"
    if not best.config:  # a command without a knob
        console.print(Text(f"measured {speed_of(best.trial)}", style=hero))
        console.print()
        console.print(_side_by_side({"": best}))
        console.print()
        return
    console.print(Text(f"winner   trial {best.trial.number}: {speed_of(best.trial)}{kind}", style=hero))
    if unconfirmed:
        console.print(Text(f"         {fold(unconfirmed)}", style="yellow"))
    if default is None:
        console.print(Text(f"default  {_default_failed(result)}"))
    else:
        console.print(Text(f"default  trial {default.trial.number}: {speed_of(default.trial)}"))
        if default.trial.number == best.trial.number:
            reason = summary.only_default(result.all_trials) or "the default configuration is the winner"
            console.print(Text(f"gain     none: {reason}", style="bold"))
        elif gain is not None:
            gain_line, style = (f"gain     {gain}", "bold") if gain.shown else (str(gain), "yellow")
            console.print(Text(gain_line, style=style))
    exact = result.best_exact if best.trial.lossy else None
    if best.trial.lossy:
        best_exact = f"trial {exact.trial.number}: {speed_of(exact.trial)}" if exact is not None else "none succeeded"
        console.print(Text(f"{summary.exactness(result.all_trials)}  {best_exact}"))
    if failed := summary.failures(result.all_trials):
        console.print(Text(f"trials   {fold(failed)}", style="yellow"))
    if tied := summary.tied(result.all_trials):
        plural = "s" if len(tied) > 1 else ""
        tied_text = ", ".join(f"{trial.number} ({speed(trial.throughput, '')})" for trial in tied)
        console.print(
            Text(f"tie      with trial{plural} {tied_text}: the one with more free memory wins, then the simpler one")
        )
    if result.seconds_again >= 1:
        share = f"{100 * result.seconds_again / result.seconds:.0f} %"
        spent = words.duration(result.seconds_again)
        console.print(
            Text(f"time     {words.duration(result.seconds)}, of which {spent} ({share}) measuring the leaders again")
        )
    console.print()
    sides = {"winner": best}
    for name, candidate in ((summary.exactness(result.all_trials), exact), ("default", default)):
        if candidate is not None and all(candidate.trial.number != side.trial.number for side in sides.values()):
            sides[name] = candidate
    console.print(_side_by_side(sides))
    console.print()


def _side_by_side(sides: Mapping[str, Candidate]) -> Table:
    """Returns the numbers and knobs of the winner beside those of the others, each in a column under its name."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=len(sides) > 1)
    table.add_column("")
    for name in sides:
        table.add_column(Text(name, style="dim"), overflow="fold")
    for name, cells in _numbers(list(sides.values())):
        if any(cells):
            table.add_row(Text(name, style="dim"), *cells)
    winner, *_ = sides.values()
    for name in winner.config:
        cells = [
            marked_text(candidate.config[name], lossy=name in candidate.trial.lossy)
            if name in candidate.config
            else "-"
            for candidate in sides.values()
        ]
        style = "bold" if len(set(cells)) > 1 else ""
        table.add_row(Text(fold(name), style=style), *(Text(fold(cell), style=style) for cell in cells))
    return table


def _numbers(sides: list[Candidate]) -> list[tuple[str, list[str]]]:
    measured = [candidate.measurement for candidate in sides]
    remeasured = any(candidate.trial.remeasured for candidate in sides)
    precisions = [str(candidate.config.get("precision", "")) for candidate in sides]
    return [
        ("step", [f"{measurement.step_ms:,.1f} ms" if measurement.step_ms else "" for measurement in measured]),
        (
            "tokens",
            [
                f"{measurement.tokens_per_second:,.4g} a second"
                if measurement.tokens_per_second and measurement.unit != "tokens/s"
                else ""
                for measurement in measured
            ],
        ),
        (
            "peak memory",
            [
                words.memory(measurement.peak_memory_mib) if measurement.peak_memory_mib else ""
                for measurement in measured
            ],
        ),
        # Shares of the peaks of two formats are not comparable: that of the winner may be the smaller one.
        (
            "TFLOP/s per device",
            [
                f"{measurement.tflops_per_device:.3g}"
                if len(set(precisions)) > 1 and measurement.tflops_per_device
                else ""
                for measurement in measured
            ],
        ),
        (
            "MFU",
            [
                f"{100 * measurement.mfu:.2g} % of {precision + ' ' if precision else ''}peak"
                if measurement.mfu and len(set(precisions)) == 1
                else ""
                for measurement, precision in zip(measured, precisions)
            ],
        ),
        *_observed([measurement.observed for measurement in measured]),
        ("reported first" if remeasured else "reported", [fold(measurement.told) for measurement in measured]),
        (
            "measured again",
            [_times(len(candidate.trial.remeasured)) for candidate in sides],
        ),
    ]


def _times(count: int) -> str:
    return f"{count} time{'s'[: count != 1]}" if count else ""


def _observed(sides: list[Mapping[str, Any] | None]) -> list[tuple[str, list[str]]]:
    """Returns rows with the observations of the trainings that commands run; none if a side has no observation."""
    if not all(sides):
        return []
    rows = {"samples a step": batch_text, "wall time": parts_text, "formats": formats_text, "limited by": binding}
    return [(name, [row(observed) for observed in sides if observed is not None]) for name, row in rows.items()]


def _default_failed(result: Result) -> str:
    trial = next((trial for trial in result.all_trials if trial.sampler == DEFAULT), None)
    if trial is None or trial.pending:
        return "not measured"
    return f"{trial.measured.status} ({fold(trial.measured.reason)})"


def _next_commands(result: Result, of_command: bool, storage: str | None) -> list[str]:
    folder = shlex.quote(str(result.folder))
    if result.interrupted:
        storage_option = f" --storage {shlex.quote(without_password(storage))}" if storage else ""
        return [f"next     redline tune --out {folder}{storage_option} --resume"]
    if result.best is None:
        outcomes = (trial.measured for trial in result.all_trials if not trial.pending)
        failures = (Status.CRASH, Status.TIMEOUT)
        crash = next((outcome for outcome in outcomes if outcome.log and outcome.status in failures), None)
        if crash is None or result.folder is None:
            return [f"next     redline show {folder}"]
        rank = re.match(r"rank \d+(?=: )", crash.reason)
        lines = _end_of(result.folder, crash.log, f"[{rank[0]}] " if rank else "")
        return [*lines, f"next     read {shlex.quote(f'{result.folder}/{crash.log}')}"]
    report = f"next     redline report {folder}"
    if of_command:  # without a knob the winner's command is the one that was given
        return [report, f"         sh {folder}/winner/command.sh"] if result.best.config else [report]
    from ..frameworks.export import suited_target

    return [report, f"         redline export {folder} --to {suited_target(result.best.config)}   (or --list)"]


def _end_of(folder: Path, log: str, beginning: str) -> list[str]:
    """Returns the last lines of a trial's log that begin like this; none if it cannot be read.

    Other ranks, which lose the connection to the one that failed, print their errors after its own.
    """
    try:
        log_tail, _ = tail_inside(folder, log, at_most=65536)
    except OSError:
        return []
    lines = [line for line in log_tail.splitlines() if line.strip() and line.startswith(beginning)]
    return [f"  {fold(line)}" for line in lines[-LOG_LINES:]]


PARTS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "data": "waiting for batches",
    "evaluation": "evaluation",
    "saving": "saving",
    "other": "other",
}
"""Parts of the wall time, by the observer's names."""
DATA_BOUND, OPTIMIZER_BOUND, OTHER_BOUND = 0.1, 0.3, 0.3
"""Shares of the wall time from which a part other than the passes is reported as the bottleneck."""
LEAST_SHARE = 0.005
"""Share below which a part is not shown."""


def parts_text(observed: Mapping[str, Any]) -> str:
    """Returns the shares of the wall time, largest first: `backward 48 %, forward 40 %, optimizer 12 %`."""
    shares = sorted(observed["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{PARTS[name]} {share:.0%}".replace("%", " %") for name, share in shares if share >= LEAST_SHARE)


def batch_text(observed: Mapping[str, Any]) -> str:
    """Returns the samples of a step, with passes, micro-batch and ranks: `64: 4 passes of 8 on 2 ranks`."""
    samples, micro = observed["samples_per_step"], observed["micro_batch"]
    if samples is None:
        return "not known"
    if not micro:
        return f"{samples:,.6g}"
    passes, ranks = observed["backwards"], observed["ranks"]
    return f"{samples:,.6g}: {passes:,.6g} pass{'es'[: 2 * (passes != 1)]} of {micro:,.6g}" + (
        f" on {ranks} ranks" if ranks > 1 else ""
    )


def formats_text(observed: Mapping[str, Any]) -> str:
    """Returns the formats of the trained parameters and of the matrix products."""
    trained = ", ".join(f"{count:,} in {name}" for name, count in observed["trained"].items())
    products = observed["products"]
    return "; ".join(filter(None, [trained, f"matrix products in {products}" if products else ""]))


def binding(observed: Mapping[str, Any]) -> str:
    """Returns the bottleneck of the training as a text."""
    shares = observed["shares"]
    if shares.get("data", 0.0) >= DATA_BOUND:
        return "the data loader: the training waits for batches (more workers, or less work a sample)"
    if observed["stalled"] >= DATA_BOUND:
        return "stalls: some steps take far longer than the median"
    if shares.get("optimizer", 0.0) >= OPTIMIZER_BOUND:
        return "the optimizer's step: more samples a step, or a fused optimizer"
    if shares.get("other", 0.0) >= OTHER_BOUND:
        return "work outside of passes and optimizer: logging, copies, synchronisation, Python"
    return "the forward and backward passes"
