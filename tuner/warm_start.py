"""Warm start: a prior from earlier runs of the same model, command or callable.

What an earlier run shows is which knobs pay, and by how much, beyond what the estimate says: the logarithm of measured
over expected throughput of its trials, without its mean, since the level is not transferred. The speed of this workload,
and what fits, are learnt from its own trials only.

Notation, logarithms throughout:

    f(x)      deviation from the estimate, or without one from the mean, at configuration x of this search
    f_r(x)    the same in the earlier run r, of which y_j was observed at x_j, with noise s
    w_r       correlation of f_r with f: 1 for a run of the same task, `ELSEWHERE` on other devices or with other sizes
    k         covariance of f; f and f_r have w_r k, two runs w_r w_q k, a run with itself k

The mean of f is m(x) = sum_j w_r(j) k(x, x_j) a_j with a = (k * W + s^2 I)^-1 y, where W has 1 within a run and w_r w_q
between two. Source: Bonilla, Chai and Williams, "Multi-task Gaussian Process Prediction" (2008), with the correlations
given. The search learns from its own trials how far each f_r holds.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..base.errors import SpaceError, UsageError
from ..results import Trial
from ..space import Config, Space
from .history import EarlierRun
from .samplers.encoding import Encoding, Features
from .samplers.gaussian_process import Kernel, Points, Scales, fit_scales
from .samplers.prior import Correction, Prior

ELSEWHERE = 0.6
"""Correlation of the deviations of two tasks of one model. Recorded tables of nanotron on 8 to 512 H100 have 0.69, 0.50, 0.32 and
0.35 where the devices differ by a factor of 2, 4, 8 and 16 (log throughput of the same configurations)."""
LEVEL = 2.0
"""Prior deviation of the level if the base estimate does not keep its own."""
EXPECTED = Scales(joint=0.3, additive=0.3, noise=0.05)
"""Medians of the scales before fitting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """The part of an earlier run that counts."""

    trials: tuple[Trial, ...]
    """Successful trials with values that this search's knobs have."""
    configs: tuple[Config, ...]
    """Their configurations in this search's space; only the free knobs are reliable."""
    weight: float
    """Correlation with this search, 0 to 1."""
    summary: str
    """What counts of the run, and the knobs of only one of both, in a line."""


def take(run: EarlierRun, space: Space, asked: Mapping[str, Any], unit: str = "") -> Transferred:
    """Returns the part of a run that counts in a search.

    Args:
        run: the earlier run.
        space: space of the search.
        asked: request of the search, as in run.yaml.
        unit: unit of the search's throughput; empty if unknown.

    Raises:
        UsageError: nothing can be transferred; the message says why.
    """
    encoding, default = Encoding(space), space.default()
    knobs, their_knobs = set(encoding.names), {knob for trial in run.trials for knob in trial.config}
    shared = sorted(knobs & their_knobs)
    succeeded = [trial for trial in run.trials if trial.ok and (trial.measured.throughput or 0) > 0]
    trials, configs = [], []
    for trial in succeeded:
        here = Config({**default, **{knob: trial.config[knob] for knob in shared if knob in trial.config}})
        if encoding.encode(here) is not None:
            trials.append(trial)
            configs.append(here)
    units = {trial.measured.unit for trial in trials} - {""}
    reason = _other_target(run.asked, asked)
    if reason is None and not succeeded:
        reason = "none of its trials succeeded"
    elif reason is None and len(set(configs)) < 2:
        reason = f"no knob of this search varies among its trials that succeeded (its knobs: {', '.join(sorted(their_knobs))})"
    elif reason is None and (len(units) > 1 or (unit and not units <= {unit})):
        reason = f"it counts {', '.join(sorted(units))}" + (f", this search {unit}" if unit else "")
    if reason is not None:
        raise UsageError(f"warm start from {run.name}: nothing can be taken: {reason}")
    same = all(_task(run.asked)[name] == value for name, value in _task(asked).items())
    parts = [f"{len(trials)} of {len(run.trials)} trials count" + ("" if same else ", of another task")]
    if only_here := sorted(knobs - their_knobs):
        parts.append(f"knobs only here: {', '.join(only_here)}")
    if only_there := sorted(their_knobs - knobs - set(default)):
        parts.append(f"only there: {', '.join(only_there)}")
    return Transferred(
        trials=tuple(trials),
        configs=tuple(configs),
        weight=1.0 if same else ELSEWHERE,
        summary=f"warm start from {run.name}: {'; '.join(parts)}",
    )


def _other_target(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why a run trained something else; None if it did not, or if only its program knows."""
    before, now = there.get("workload") or {}, here.get("workload") or {}
    for kind in ("callable", "command"):
        if kind in before or kind in now:
            return None if kind in before and kind in now else f"one of them is a {kind}, the other is not"
    if any(before.get(name) != now.get(name) for name in ("spec", "lora")):
        return f"it trains another model ({there.get('model')}, here {here.get('model')})"
    return None


def _task(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of the same task have in common."""
    devices = asked.get("devices") or {}
    return {
        "workload": asked.get("workload"),
        "devices": [devices.get(name) for name in ("type", "name", "used")],
        "simulated": [bool(asked.get("simulated")), asked.get("simulated") and asked.get("seed")],
        "emulated": bool(asked.get("emulated")),
        **{name: asked.get(name) for name in ("seq_len", "global_batch")},
    }


class Transfer:
    """The mean of f given the observations of f_r in the earlier runs.

    Args:
        points: points of the observations, shape (n, columns).
        values: y, shape (n,); NaN if nothing was observed.
        owner: index of the run of each, shape (n,).
        weights: w of each run, shape (runs,).
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, owner: np.ndarray, weights: np.ndarray) -> None:
        rows = np.flatnonzero(np.isfinite(values))
        points, values, owner = points[rows], values[rows], owner[rows]
        self._runs, self._kernel = len(weights), None
        if not len(rows):
            return
        # Scales fitted to less similar runs would mostly reflect their differences.
        similar = weights[owner] == weights[owner].max()
        scales, _ = fit_scales(points[similar], values[similar], np.zeros((int(similar.sum()), 0)), EXPECTED)
        none = np.zeros((len(rows), 0))
        self._kernel, self._points = Kernel(scales, points.shape[1]), Points.of(points)
        correlation = np.where(owner[:, None] == owner, 1.0, np.outer(weights[owner], weights[owner]))
        covariance = self._kernel.between(self._points, self._points, none, none) * correlation
        covariance[np.diag_indices(len(rows))] += scales.noise**2 + 1e-8
        moved = weights[owner] * np.linalg.solve(covariance, values)
        self._moved = moved[:, None] * (owner[:, None] == np.arange(self._runs))
        """w a, in the column of its run: shape (n, runs)."""

    def parts(self, at: np.ndarray) -> np.ndarray:
        """Contribution of each run to the mean at points (m, columns): shape (m, runs); 0 far from its observations."""
        if self._kernel is None:
            return np.zeros((len(at), self._runs))
        none_at, none = np.zeros((len(at), 0)), np.zeros((self._points.rows, 0))
        return self._kernel.between(at, self._points, none_at, none) @ self._moved


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmEstimate:
    """An estimate corrected by earlier runs."""

    throughput: float
    """In the unit of the base estimate; without one only ratios are meaningful."""
    peak_memory_mib: float | None
    """None if the base estimate has none."""
    fits: bool | None
    """Value of the base estimate."""


class WarmStart(Correction):
    """A prior that multiplies an estimate by the ratio of measured to expected throughput of earlier trials.

    The expected throughput is the trial's `predicted_throughput`, or that of the base estimate; without an estimate, the
    run's mean.

    Args:
        space: space of this search.
        runs: earlier runs, at least one.
        base: the base estimate, `prior(config)`, or None.
        warn: receives warnings about the estimate, once each.
    """

    def __init__(
        self,
        space: Space,
        runs: Sequence[Transferred],
        base: Callable[[Config], Any] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._space = space
        self.base = base
        self.weight = max(run.weight for run in runs)
        self._base = None if base is None else Prior(base, warn=warn)
        self._features = Features(Encoding(space))
        self._weights = np.array([run.weight for run in runs])
        points = np.concatenate([self._features.numeric(run.configs) for run in runs])
        owner = np.repeat(np.arange(len(runs)), [len(run.trials) for run in runs])
        speed, memory = zip(*map(self._residuals, runs))
        self._speed = Transfer(points, np.concatenate(speed), owner, self._weights)
        self._memory = Transfer(points, np.concatenate(memory), owner, self._weights)

    def __call__(self, config: Config) -> WarmEstimate:
        """Corrected estimate of a configuration of this search's space."""
        table = self.table([config])
        peak, fits = float(table.peak_memory_mib[0]), float(table.probability_fits[0])
        return WarmEstimate(
            throughput=float(table.throughput[0]),
            peak_memory_mib=None if math.isnan(peak) else peak,
            fits=None if math.isnan(fits) else fits >= 0.5,
        )

    def table(self, configs: Sequence[Config]) -> Any:
        """Corrected estimates of many configurations: an object with `throughput`, `peak_memory_mib`,
        `fullest_memory_mib`, `probability_fits` and their uncertainty (see `samplers.prior`); arrays of shape
        (n,), effects (n, factors).
        """
        at = self._features.numeric(configs)
        parts = self._speed.parts(at)
        speed, memory = np.exp(parts.sum(axis=1)), np.exp(self._memory.parts(at).sum(axis=1))
        # The true weight of a run is a factor that the search learns.
        unsure = self._weights < 1
        weights = self._weights[unsure]
        effects = parts[:, unsure] * np.sqrt(1 - weights**2) / weights
        if self._base is None:
            unknown = np.full(len(configs), np.nan)
            corrected = SimpleNamespace(
                throughput=speed, peak_memory_mib=unknown, fullest_memory_mib=unknown, probability_fits=unknown
            )
            own = np.zeros((len(configs), 0))
        else:
            found = self._base.predict(configs)
            corrected = SimpleNamespace(
                throughput=np.exp(found.log_throughput) * speed,
                peak_memory_mib=np.exp(found.log_memory) * memory,
                fullest_memory_mib=np.exp(found.log_need) * memory,
                probability_fits=found.fits,
                log_throughput_std=np.sqrt(found.log_std**2 + (effects**2).sum(axis=1)),
                log_throughput_risk=found.risk,
            )
            own = found.effects
        if effects.shape[1] and not own.shape[1]:
            own = np.full((len(configs), 1), LEVEL)
        corrected.log_throughput_effects = np.column_stack([own, effects])
        return corrected

    def _residuals(self, run: Transferred) -> tuple[np.ndarray, np.ndarray]:
        """Logs of measured over expected values: throughputs without the run's own mean, since the level is not
        transferred, and peak memories; NaN if unknown; shape (n,) each.
        """
        trials = run.trials
        speed = np.log([trial.throughput for trial in trials])
        memory = np.log([trial.measured.peak_memory_mib or math.nan for trial in trials])
        if self._base is None:
            return speed - speed.mean(), np.full(len(trials), np.nan)
        expected_speed = np.log([trial.predicted_throughput or math.nan for trial in trials])
        expected_memory = np.log([trial.predicted_memory_mib or math.nan for trial in trials])
        if not np.isfinite(expected_speed).all():
            expected_speed, expected_memory = self._predicted(self._base, run.configs)
        speed = speed - expected_speed
        return speed - (np.nanmean(speed) if np.isfinite(speed).any() else 0.0), memory - expected_memory

    def _predicted(self, base: Prior, configs: Sequence[Config]) -> tuple[np.ndarray, np.ndarray]:
        """Log throughput and log memory of the base estimate, `base`, for the free knobs of these configurations;
        NaN if they are not valid here; shape (n,) each.
        """
        speed, memory = np.full(len(configs), np.nan), np.full(len(configs), np.nan)
        rows, valid = [], []
        for row, config in enumerate(configs):
            with contextlib.suppress(SpaceError):
                free = [knob.name for knob in self._space.free]
                valid.append(self._space.config({name: config[name] for name in free if name in config}))
                rows.append(row)
        if rows:
            found = base.predict(valid)
            speed[rows], memory[rows] = found.log_throughput, found.log_memory
        return speed, memory
