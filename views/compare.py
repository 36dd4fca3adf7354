"""Comparison of runs: the knobs and numbers of their winners, and the significance of the difference."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import UsageError
from ..results import request, summary
from ..results.again import Z95
from ..results.columns import knob_text, number
from ..results.measurement import Status, Trial
from ..results.view import View

SIGNIFICANT = 0.05
"""Probability below which a difference counts as significant."""
_NOTED = ("workload", "seq_len", "global_batch", "devices", "memory_limit_mib")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    """The folder of the run, as the user wrote it."""
    trials: tuple[Trial, ...]
    document: Mapping[str, Any] | None
    """The contents of run.yaml."""

    @property
    def best(self) -> Trial | None:
        """The winner."""
        return summary.best(self.trials)

    @property
    def throughput(self) -> float | None:
        """Throughput of the winner, by which it is ranked."""
        return self.best.throughput if self.best else None

    @property
    def error(self) -> float | None:
        """Relative standard error of the winner's throughput; None without recorded spread."""
        return relative_error(self.best) if self.best else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How a run's winner compares with the first run's."""

    ratio: float
    """Throughput divided by that of the first run."""
    p: float | None
    """Probability of a difference at least this large if both were equally fast; None without recorded spread."""

    @property
    def words(self) -> str:
        """The verdict in words."""
        change = f"{abs(self.ratio - 1):.1%} {'faster' if self.ratio >= 1 else 'slower'}"
        if self.p is None:
            return f"{change}; no spread was recorded, so it may be noise"
        if self.p < SIGNIFICANT:
            return f"{change} (p {_p(self.p)})"
        return f"{change}, which is not significant (p {_p(self.p)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several runs; each is compared with the first."""

    sides: tuple[ComparedRun, ...]
    knobs: tuple[tuple[str, tuple[str, ...]], ...]
    """Name of each knob and its value in each winner, `-` where the winner does not have it."""
    numbers: tuple[tuple[str, tuple[str, ...]], ...]
    """Name of each number and its text in each run, empty where it is unknown."""
    values: Mapping[str, tuple[float | None, ...]]
    """The same numbers by name: those of a measurement have the names of trials.csv."""
    differences: tuple[Difference | None, ...]
    """One for each run but the first; None where one of the two has no winner."""
    notes: tuple[str, ...]
    """Other differences between the runs."""

    def rows(self) -> list[list[str]]:
        """Returns the rows of a table: a name, and a cell for each run."""
        return [[name, *cells] for name, cells in (*self.knobs, *self.numbers)]

    def to_json(self) -> str:
        """Returns the comparison as JSON."""
        return (
            json.dumps(
                {
                    "runs": [side.name for side in self.sides],
                    "knobs": {name: list(cells) for name, cells in self.knobs},
                    "numbers": {name: list(numbers) for name, numbers in self.values.items()},
                    "differences": [
                        None
                        if difference is None
                        else {"ratio": difference.ratio, "p": difference.p, "words": difference.words}
                        for difference in self.differences
                    ],
                    "notes": list(self.notes),
                },
                indent=2,
            )
            + "\n"
        )


def compare(views: Sequence[View]) -> Comparison:
    """Returns the comparison of runs.

    Raises:
        UsageError: fewer than two runs, or runs with different knobs or units.
    """
    if len(views) < 2:
        raise UsageError(f"a comparison needs two runs or more, but got {len(views)}")
    sides = tuple(
        ComparedRun(name=str(view.path), trials=tuple(view.trials()), document=view.document) for view in views
    )
    _check_same_knobs(sides)
    numbers, values = _numbers(sides)
    return Comparison(
        sides=sides,
        knobs=tuple(_knobs(sides)),
        numbers=numbers,
        values=values,
        differences=tuple(_difference(sides[0], side) for side in sides[1:]),
        notes=tuple(_notes(sides)),
    )


def relative_error(trial: Trial) -> float | None:
    """Returns the relative standard error of a trial's throughput; None without recorded spread."""
    spread = trial.measured.spread
    return None if spread is None else spread / Z95


def probability(ratio: float, error: float, base_error: float) -> float:
    """Returns the probability of a ratio of throughputs at least so far from 1 if there were no difference.

    It is a two-sided z-test of the logarithm of the ratio; its standard error combines both relative errors.
    """
    spread = math.hypot(error, base_error)
    if spread == 0:
        return 1.0 if ratio == 1 else 0.0
    return math.erfc(abs(math.log(ratio)) / spread / math.sqrt(2))


def _difference(base: ComparedRun, side: ComparedRun) -> Difference | None:
    if not base.throughput or not side.throughput:
        return None
    ratio = side.throughput / base.throughput
    error, base_error = side.error, base.error
    p = None if error is None or base_error is None or ratio <= 0 else probability(ratio, error, base_error)
    return Difference(ratio=ratio, p=p)


def _knob_sets(side: ComparedRun) -> set[str]:
    """Returns the knobs of a run's space.

    Without run.yaml they are those of its trials, where conditional knobs may be missing.
    """
    space = ((side.document or {}).get("asked") or {}).get("space") or {}
    declared = space.get("knobs") if isinstance(space, Mapping) else None
    names = {knob["name"] for knob in declared or () if isinstance(knob, Mapping) and knob.get("name")}
    return names | {name for trial in side.trials for name in trial.config}


def _check_same_knobs(sides: Sequence[ComparedRun]) -> None:
    base_knobs = _knob_sets(sides[0])
    for side in sides[1:]:
        knobs = _knob_sets(side)
        if base_knobs and knobs and base_knobs != knobs:
            only = [
                f"only '{which.name}' has {', '.join(sorted(names))}"
                for which, names in ((sides[0], base_knobs - knobs), (side, knobs - base_knobs))
                if names
            ]
            raise UsageError(f"these runs do not have the same space: {'; '.join(only)}")
    units: dict[str, str] = {}
    for side in sides:
        for trial in side.trials:
            if trial.ok:
                units.setdefault(trial.measured.unit, side.name)
    if len(units) > 1:
        units_text = ", ".join(f"'{name}' in {unit or 'a unit of its own'}" for unit, name in units.items())
        raise UsageError(f"these runs do not count in the same unit: {units_text}")


def _knobs(sides: Sequence[ComparedRun]) -> list[tuple[str, tuple[str, ...]]]:
    winners = [side.best for side in sides]
    names = dict.fromkeys(name for winner in winners if winner for name in winner.config)
    return [
        (name, tuple(knob_text(winner, name) if winner and name in winner.config else "-" for winner in winners))
        for name in names
    ]


def _numbers(
    sides: Sequence[ComparedRun],
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], dict[str, tuple[float | None, ...]]]:
    """The numbers as texts by heading, without those that are 0 or unknown in every run, and as values by name."""
    unit = next((side.best.measured.unit for side in sides if side.best), "")
    texts: list[tuple[str, tuple[str, ...]]] = []
    values: dict[str, tuple[float | None, ...]] = {}
    precisions = {str(side.best.config.get("precision", "")) for side in sides if side.best}

    def row(heading: str, name: str, value_of: Any, digits: int = 5, scale: int = 1) -> None:
        numbers = values[name] = tuple(value_of(side) for side in sides)
        if not any(numbers):
            return
        cells = ["" if value is None else number(value * scale, digits) for value in numbers]
        if name == "mfu" and len(precisions) > 1:
            # Shares of the peaks of two formats are not comparable: that of the faster one may be smaller.
            cells = [
                f"{cell} of {side.best.config['precision']}" if cell and side.best else cell
                for cell, side in zip(cells, sides)
            ]
        texts.append((heading, tuple(cells)))

    def best(field: str) -> Any:
        return lambda side: getattr(side.best.measurement, field) if side.best else None

    def spent(side: ComparedRun) -> float | None:
        seconds = [
            trial.measured.seconds_total * (trial.measured.devices or 1)
            for trial in side.trials
            if not trial.pending and trial.measured.seconds_total is not None
        ]
        return math.fsum(seconds) if seconds else None

    def gain(field: str) -> Any:
        return lambda side: (side_gain := summary.gain(side.trials)) and getattr(side_gain, field)

    row(unit or "throughput", "throughput", lambda side: side.throughput)
    row("95 % interval, +/- %", "spread", lambda side: side.error and Z95 * side.error, 3, scale=100)
    row("gain over the default", "gain", gain("ratio"), 4)
    row("its 95 % interval, +/-", "gain_half_width", gain("half_width"), 3)
    row("step ms", "step_ms", best("step_ms"))
    row("peak MiB", "peak_memory_mib", best("peak_memory_mib"))
    row("limit MiB", "memory_limit_mib", best("memory_limit_mib"))
    row("TFLOPS per device", "tflops_per_device", best("tflops_per_device"), 4)
    row("MFU", "mfu", best("mfu"), 3)
    row("loss", "loss", best("loss"), 6)
    row("devices", "devices", best("devices"))
    row("winner is trial", "number", lambda side: side.best.number if side.best else None)
    row("trials", "trials", lambda side: sum(not trial.pending for trial in side.trials))
    for status in Status:
        row(str(status), str(status), lambda side, status=status: summary.counts(side.trials)[status])
    row("device seconds", "device_seconds", spent, 4)
    return tuple(texts), values


def _notes(sides: Sequence[ComparedRun]) -> list[str]:
    notes = []
    base_request = (sides[0].document or {}).get("asked", {})
    for side in sides:
        if side.best is None:
            notes.append(f"{side.name}: {summary.why_nothing(side.trials)}")
    for side in sides[1:]:
        side_request = (side.document or {}).get("asked", {})
        if not side_request or not base_request:
            notes.append(f"{side.name} or {sides[0].name} has no run.yaml: the requests are not compared")
            continue
        for key in _NOTED:
            if key == "workload" and side_request.get("model") != base_request.get("model"):
                notes.append(
                    f"{side.name} trained {side_request.get('model')}, {sides[0].name} {base_request.get('model')}: the "
                    "difference in speed is not due to the configuration alone"
                )
                continue
            notes += [
                f"{side.name} differs from {sides[0].name} in {difference}"
                for difference in request.conflicts({key: base_request.get(key)}, {key: side_request.get(key)})
            ]
        versions = [(run.document or {}).get("environment", {}).get("versions", {}) for run in (sides[0], side)]
        notes += [f"{side.name} differs from {sides[0].name} in {line}" for line in request.version_changes(*versions)]
    return notes


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"
