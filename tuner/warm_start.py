"""What earlier runs, of another workload, say of this one: how far off the estimate was, not what it was."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..results import Trial
from ..space import Config, Space


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmEstimate:
    """An estimate that earlier runs corrected."""

    throughput: float
    """In the unit of the estimate beneath; without one only ratios mean anything."""
    peak_memory_mib: float | None
    """MiB; None where the estimate beneath has none."""
    fits: bool | None
    """As the estimate beneath has it."""


class WarmStart:
    """A prior that multiplies an estimate by what earlier trials measured over what was expected of them.

    The factor is the mean of a Gaussian process over the knobs that both spaces have. What was expected is the
    trial's own `predicted_throughput`; of trials without one, their run's mean. So a run at another sequence
    length, size or number of devices says which knobs pay, and by how much; how fast this workload is, and
    what fits, only its own trials say.

    Args:
        space: of this search.
        runs: earlier trials, one sequence a run.
        names: of the runs, for messages.
        base: the estimate beneath, `prior(config)`; None for none.

    `matched` tells in words what was used.
    """

    def __init__(
        self,
        space: Space,
        runs: Sequence[Sequence[Trial]],
        names: Sequence[str],
        base: Callable[[Config], Any] | None = None,
    ) -> None:
        from .samplers.encoding import Encoding
        from .samplers.features import Features

        self._base = base
        self._encoding = Encoding(space)
        self._features = Features(self._encoding)
        self._default = space.default()
        self.matched: list[str] = []
        """One line a run: what matched and what did not."""
        points, throughputs, memories = [], [], []
        for trials, name in zip(runs, names):
            used, codes = self._match(trials, name)
            if not used:
                continue
            residual = _residuals([t.measurement.throughput for t in used], [t.predicted_throughput for t in used])
            peaks = [t.measurement.peak_memory_mib for t in used]
            expected = [t.predicted_memory_mib for t in used]
            memory = [math.log(p / e) if p and e else math.nan for p, e in zip(peaks, expected)]
            points.append(self._features.of(np.array(codes)))
            throughputs.append(residual)
            memories.append(np.array(memory))
        self.trials = sum(len(each) for each in throughputs)
        """Earlier trials that count."""
        columns = self._features.columns
        self._points = np.concatenate(points) if points else np.zeros((0, columns))
        self._throughput = np.concatenate(throughputs) if points else np.zeros(0)
        self._memory = np.concatenate(memories) if points else np.zeros(0)

    def __call__(self, config: Config) -> WarmEstimate:
        """The corrected estimate of a configuration of this search's space."""
        return self._estimates([config])[0]

    def table(self, configs: Sequence[Config]) -> Any:
        """Corrected estimates of many: an object with `throughput`, `peak_memory_mib`, `fullest_memory_mib`,
        `probability_fits` and, with an estimate beneath, what that says of its own doubt; arrays of shape (n,)."""
        from types import SimpleNamespace

        from .samplers.prior import Prior

        at = self._features.numeric(configs)
        speed = np.exp(self._factor(at, self._throughput))
        known = np.isfinite(self._memory)
        memory = np.exp(self._factor(at, self._memory, known))
        if self._base is None:
            unknown = np.full(len(configs), np.nan)
            return SimpleNamespace(
                throughput=speed, peak_memory_mib=unknown, fullest_memory_mib=unknown, probability_fits=unknown
            )
        found = Prior(self._base).predict(configs)
        return SimpleNamespace(
            throughput=np.exp(found.log_throughput) * speed,
            peak_memory_mib=np.exp(found.log_memory) * memory,
            fullest_memory_mib=np.exp(found.log_need) * memory,
            probability_fits=found.fits,
            log_throughput_std=found.log_std,
            log_throughput_effects=found.effects,
        )

    def _estimates(self, configs: Sequence[Config]) -> list[WarmEstimate]:
        table = self.table(configs)
        return [
            WarmEstimate(
                throughput=float(table.throughput[i]),
                peak_memory_mib=None if np.isnan(table.peak_memory_mib[i]) else float(table.peak_memory_mib[i]),
                fits=None if np.isnan(table.probability_fits[i]) else bool(table.probability_fits[i] >= 0.5),
            )
            for i in range(len(configs))
        ]

    def _factor(self, at: np.ndarray, values: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Log factor at points (m, columns): 0 far from every trial."""
        from .samplers.gaussian_process import Kernel, Posterior, Scales, fit_scales

        rows = np.arange(len(values)) if known is None else np.flatnonzero(known)
        if not len(rows):
            return np.zeros(len(at))
        points, values = self._points[rows], values[rows]
        none, none_at = np.zeros((len(rows), 0)), np.zeros((len(at), 0))
        scales, _ = fit_scales(points, values, none, Scales(joint=0.3, additive=0.3, noise=0.05))
        noise = np.full(len(rows), scales.noise**2)
        return Posterior(Kernel(scales, points.shape[1]), points, values, noise, none, at, none_at).mean

    def _match(self, trials: Sequence[Trial], name: str) -> tuple[list[Trial], list[np.ndarray]]:
        knobs = set(self._encoding.names)
        theirs = {knob for trial in trials for knob in trial.config}
        shared = sorted(knobs & theirs)
        fixed = {knob for knob in self._default if knob not in knobs}
        used, codes, foreign = [], [], 0
        for trial in trials:
            if not trial.ok or not (trial.measurement.throughput or 0) > 0:
                continue
            values = {**self._default, **{knob: trial.config[knob] for knob in shared if knob in trial.config}}
            code = self._encoding.encode(Config(values))
            if not shared or code is None:
                foreign += 1
                continue
            used.append(trial)
            codes.append(code)
        said = [f"{len(used)} of {len(trials)} trials count"]
        if shared:
            said.append(f"knobs in both: {', '.join(shared)}")
        if here := sorted(knobs - theirs):
            said.append(f"only here: {', '.join(here)}")
        if there := sorted(theirs - knobs - fixed):
            said.append(f"only there: {', '.join(there)}")
        if foreign:
            said.append(f"{foreign} have values that no knob has here")
        self.matched.append(f"warm start from {name}: {'; '.join(said)}")
        return used, codes


def read_runs(folders: Sequence[str | Path]) -> tuple[list[list[Trial]], list[str]]:
    """The finished trials of earlier runs, and their names.

    Raises:
        UsageError: a folder holds no run.
    """
    from ..errors import StudyError
    from ..results import View
    from .search import REFINEMENT

    runs, names = [], []
    for folder in folders:
        try:
            trials = View(folder, Config).trials()
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        # What names single blocks is beyond every space.
        runs.append([trial for trial in trials if not trial.pending and trial.sampler != REFINEMENT])
        names.append(str(folder))
    return runs, names


def _residuals(measured: Sequence[float], expected: Sequence[float | None]) -> np.ndarray:
    """Log of measured over expected, shape (n,), each run's own mean taken off: the level says nothing here."""
    if all(each is not None and each > 0 for each in expected):
        logs = np.log(np.array(measured) / np.array(expected, dtype=float))
    else:
        logs = np.log(np.array(measured))
    return logs - logs.mean()
