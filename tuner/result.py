"""Result of a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import NothingFound
from ..knobs.lossy import lossy_values
from ..knobs.text import config_text
from ..results import Measurement, Trial, summary, table_frame
from ..results.columns import speed
from ..space import Config

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that ran, with its final measurements."""

    config: Config
    throughput: float
    """The median of the re-measurements, or the first measurement if there are none."""
    measurement: Measurement
    trial: Trial

    @property
    def value(self) -> float:
        """The throughput, or if smaller is better the quantity whose reciprocal it is."""
        return 1 / self.throughput if self.measurement.unit.startswith("1/") else self.throughput

    def __repr__(self) -> str:
        reached = speed(self.throughput, self.measurement.unit)
        return f"Candidate(trial {self.trial.number}: {reached}; {config_text(self.config)})"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a search."""

    best: Candidate | None
    """The winner; None if no trial succeeded, and `why` says why. `winner` raises instead."""
    default: Candidate | None
    """The default configuration; None if it was not tried or did not run."""
    why: str
    """Reason for a missing winner; empty if there is a winner."""
    ended: str
    """Why the search ended."""
    interrupted: bool
    """True if the search was interrupted."""
    folder: Path | None
    """Folder of the run; None if nothing was saved."""
    all_trials: tuple[Trial, ...]
    """Every trial in order."""
    knobs: tuple[str, ...]
    """Names of the knobs, in the order of columns."""
    best_exact: Candidate | None = None
    """The best without lossy values, which trade accuracy for speed (`best.trial.lossy` names the knobs that have
    one): the winner itself unless lossy values were allowed; None if no such trial succeeded.
    """
    notes: tuple[str, ...] = ()
    """Notes and warnings of the search."""
    emulated: bool = False
    """True if some ranks of each trial ran alone on one device, and communication was priced."""
    seconds: float = 0.0
    """Wall time of this call, s."""
    seconds_again: float = 0.0
    """Wall time of the re-measurement of the leaders, which `seconds` includes, s."""

    @property
    def winner(self) -> Candidate:
        """`best`, which must exist.

        Raises:
            NothingFound: no trial succeeded; the message says why.
        """
        if self.best is None:
            raise NothingFound(f"there is no winner: {self.why}")
        return self.best

    @property
    def gain(self) -> float | None:
        """The winner's throughput over the default configuration's; None if either is missing."""
        found = summary.gain(self.all_trials)
        return None if found is None else found.ratio

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """95 % interval of `gain`; None if unknown. If it includes 1, no gain is shown."""
        found = summary.gain(self.all_trials)
        return None if found is None else found.interval

    @property
    def trials(self) -> "DataFrame":
        """The trials as a DataFrame with the columns of trials.csv."""
        return table_frame([trial for trial in self.all_trials if not trial.pending], self.knobs)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready summary."""
        return {
            "best": _entry(self.best),
            "best_exact": _entry(self.best_exact),
            "default": _entry(self.default),
            "gain": self.gain,
            "gain_interval": list(self.gain_interval) if self.gain_interval else None,
            "why": self.why or None,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "emulated": self.emulated,
            "seconds": round(self.seconds, 1),
            "seconds_again": round(self.seconds_again, 1),
            "trials": {str(name): count for name, count in summary.counts(self.all_trials).items() if count},
            "out": str(self.folder) if self.folder else None,
            "failures": summary.failures(self.all_trials) or None,
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from ..views.show import html

        return html(self.all_trials, reason=self.why)

    def __repr__(self) -> str:
        if self.best is None:
            return f"Result(best=None, why={self.why!r})"
        found = summary.gain(self.all_trials)
        gain = f", gain={found}" if found else ""
        unit = self.best.measurement.unit
        if unit.startswith("1/"):
            reached = f"{unit.removeprefix('1/')}={self.best.value:.6g}"
        else:
            reached = f"throughput={self.best.throughput:.6g} {unit}".strip()
        return f"Result(best={dict(self.best.config)}, {reached}{gain}, trials={len(self.all_trials)})"


def make_result(
    trials: Sequence[Trial],
    knobs: Sequence[str],
    *,
    folder: Path | None,
    ended: str,
    interrupted: bool,
    notes: Sequence[str] = (),
    emulated: bool = False,
    seconds: float = 0.0,
    seconds_again: float = 0.0,
) -> Result:
    """Builds the result of these trials."""
    return Result(
        best=_candidate(summary.best(trials)),
        best_exact=_candidate(summary.best_exact(trials)),
        default=_candidate(summary.default(trials)),
        why=summary.why_nothing(trials),
        ended=ended,
        interrupted=interrupted,
        folder=folder,
        all_trials=tuple(trials),
        knobs=tuple(knobs),
        notes=tuple(notes),
        emulated=emulated,
        seconds=seconds,
        seconds_again=seconds_again,
    )


def _candidate(trial: Trial | None) -> Candidate | None:
    if trial is None or not trial.ok:
        return None
    return Candidate(
        config=trial.config,
        throughput=trial.throughput,
        measurement=trial.measured,
        trial=trial,
    )


def _entry(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    return {
        "trial": candidate.trial.number,
        "config": candidate.config.to_dict(),
        "lossy": lossy_values(candidate.config, candidate.trial.lossy),
        "throughput": candidate.throughput,
        "unit": candidate.measurement.unit,
        "remeasured": list(candidate.trial.remeasured),
        "first_throughput": candidate.trial.first,
        "measurement": candidate.measurement.figures(),
    }
