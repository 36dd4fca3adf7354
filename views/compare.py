"""Comparison of runs: the knobs and numbers of their winners, and the significance of the difference."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import UsageError
from ..results import listing, request, summary
from ..results.columns import knob_text, number
from ..results.measurement import Trial
from ..results.run import View
from ..results.summary import Z95

SIGNIFICANT = 0.05
"""Probability below which a difference counts as significant."""
_NOTED = ("workload", "seq_len", "global_batch", "devices", "memory_limit_mib")


_HEADINGS = {
    "spread": ("95 % interval, +/- %", 3),
    "gain": ("gain over the default", 4),
    "gain_half_width": ("its 95 % interval, +/-", 3),
    "step_ms": ("step ms", 5),
    "peak_memory_mib": ("peak MiB", 5),
    "memory_limit_mib": ("limit MiB", 5),
    "tflops_per_device": ("TFLOPS per device", 4),
    "mfu": ("MFU", 3),
    "loss": ("loss", 6),
    "number": ("winner is trial", 5),
    "device_seconds": ("device seconds", 4),
}
"""Heading and significant digits of the numbers of a run that are shown otherwise than by their name, with five."""
_OF_WINNER = ("step_ms", "peak_memory_mib", "memory_limit_mib", "tflops_per_device", "mfu", "loss", "devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    """The folder of the run, as the user wrote it."""
    trials: tuple[Trial, ...]
    document: Mapping[str, Any]
    """The contents of run.yaml; empty if it is missing."""
    best: Trial | None
    """The winner."""

    @property
    def request(self) -> Mapping[str, Any]:
        """The request in run.yaml."""
        request: Mapping[str, Any] = self.document.get("asked", {})
        return request


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
        document = {
            "runs": [side.name for side in self.sides],
            "knobs": {name: list(cells) for name, cells in self.knobs},
            "numbers": {name: list(numbers) for name, numbers in self.values.items()},
            "differences": [
                difference and {"ratio": difference.ratio, "p": difference.p, "words": difference.words}
                for difference in self.differences
            ],
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=2) + "\n"


def compare(views: Sequence[View]) -> Comparison:
    """Returns the comparison of runs.

    Raises:
        UsageError: fewer than two runs, or runs with different knobs or units.
    """
    if len(views) < 2:
        raise UsageError(f"a comparison needs two runs or more, but got {len(views)}")
    sides = []
    for view in views:
        trials, document = tuple(view.trials()), view.document or {}
        sides.append(ComparedRun(name=str(view.path), trials=trials, document=document, best=summary.best(trials)))
    _check_same_knobs(sides)
    by_run = [_numbers(side) for side in sides]
    values = {name: tuple(numbers[name] for numbers in by_run) for name in by_run[0]}
    return Comparison(
        sides=tuple(sides),
        knobs=tuple(_knobs(sides)),
        numbers=tuple(_texts(sides, values)),
        values=values,
        differences=tuple(_difference(sides[0].best, side.best) for side in sides[1:]),
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


def _difference(base: Trial | None, winner: Trial | None) -> Difference | None:
    if base is None or winner is None or not base.throughput or not winner.throughput:
        return None
    ratio = winner.throughput / base.throughput
    error, base_error = relative_error(winner), relative_error(base)
    p = None if error is None or base_error is None or ratio <= 0 else probability(ratio, error, base_error)
    return Difference(ratio=ratio, p=p)


def _knob_sets(side: ComparedRun) -> set[str]:
    """Returns the knobs of a run's space.

    Without run.yaml they are those of its trials, where conditional knobs may be missing.
    """
    declared = (side.request.get("space") or {}).get("knobs") or ()
    return {knob["name"] for knob in declared if knob.get("name")} | set(listing.knob_names(side.trials))


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


def _numbers(side: ComparedRun) -> dict[str, float | None]:
    """Returns the numbers of a run by name: those of a measurement have the names of trials.csv."""
    best, gain = side.best, summary.gain(side.trials)
    finished = [trial.measured for trial in side.trials if not trial.pending]
    spent = [measured.seconds_total * (measured.devices or 1) for measured in finished if measured.seconds_total]
    return {
        "throughput": None if best is None else best.throughput,
        "spread": None if best is None else best.measured.spread,
        "gain": None if gain is None else gain.ratio,
        "gain_half_width": None if gain is None else gain.half_width,
        **{name: None if best is None else getattr(best.measured, name) for name in _OF_WINNER},
        "number": None if best is None else best.number,
        "trials": len(finished),
        **{str(status): count for status, count in summary.counts(side.trials).items()},
        "device_seconds": math.fsum(spent) if spent else None,
    }


def _texts(
    sides: Sequence[ComparedRun], values: Mapping[str, tuple[float | None, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields headings and cells of the numbers that are neither 0 nor unknown in every run."""
    unit = next((side.best.measured.unit for side in sides if side.best), "")
    precisions = ["" if side.best is None else str(side.best.config.get("precision", "")) for side in sides]
    for name, numbers in values.items():
        if not any(numbers):
            continue
        heading, digits = _HEADINGS.get(name, (unit or name if name == "throughput" else name, 5))
        scale = 100 if name == "spread" else 1
        cells = ["" if value is None else number(value * scale, digits) for value in numbers]
        if name == "mfu" and len(set(precisions) - {""}) > 1:
            # Shares of the peaks of two formats are not comparable: that of the faster one may be smaller.
            cells = [f"{cell} of {precision}" if cell else cell for cell, precision in zip(cells, precisions)]
        yield heading, tuple(cells)


def _notes(sides: Sequence[ComparedRun]) -> list[str]:
    base = sides[0]
    notes = [f"{side.name}: {summary.why_nothing(side.trials)}" for side in sides if side.best is None]
    for side in sides[1:]:
        if not side.request or not base.request:
            notes.append(f"{side.name} or {base.name} has no run.yaml: the requests are not compared")
            continue
        noted: tuple[str, ...] = _NOTED
        model, base_model = side.request.get("model"), base.request.get("model")
        if model != base_model:
            notes.append(
                f"{side.name} trained {model}, {base.name} {base_model}: the difference in speed is not due to the "
                "configuration alone"
            )
            noted = tuple(name for name in _NOTED if name != "workload")
        requests = ({name: run.request.get(name) for name in noted} for run in (base, side))
        versions = (run.document.get("environment", {}).get("versions", {}) for run in (base, side))
        differences = [*request.conflicts(*requests), *request.version_changes(*versions)]
        notes += [f"{side.name} differs from {base.name} in {difference}" for difference in differences]
    return notes


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"
