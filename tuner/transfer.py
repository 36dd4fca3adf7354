"""Transfer from earlier runs: which runs count, how similar their tasks are, and their predictions for untried
configurations.

The weight of an earlier run is the expected correlation between its deviations from the mean and those of this search:
a product of one factor per difference. The factors of model and devices are those of recorded tables
(`bench/warm_start.py --correlations`, log throughput of the same configurations of nanotron on 8 to 512 H100: 0.71
between two models; 0.69, 0.50, 0.32 and 0.35 if the devices differ by a factor of 2, 4, 8 and 16); the others are set
relative to these. The weight is a starting value, which the search corrects from its own trials.

Notation, logarithms throughout:

    f(x)      deviation from the estimate, or without one from the mean, at configuration x of this search
    f_r(x)    the same in the earlier run r, of which y_j was observed at x_j, with noise s
    w_r       similarity of run r to this one, 0 to 1: the correlation of f_r with f
    k         covariance of f; f and f_r have w_r k, two runs w_r w_q k, a run with itself k

The mean of f is m(x) = sum_j w_r(j) k(x, x_j) a_j with a = (k * W + s^2 I)^-1 y, where W has 1 within a run and w_r
w_q between two. A run that is half as similar has half the effect, and a long run does not count for more. Source:
Bonilla, Chai and Williams, "Multi-task Gaussian Process Prediction" (2008), with the correlations given.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isabs
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import StudyError, UsageError
from ..models.resolve import workload as resolve_workload
from ..models.server_model import ServerModel
from ..results import Trial, View
from ..results.measurement import REFINEMENT
from ..space import Config, Space
from .history import at_first_speed
from .predicting import estimator_of
from .samplers.encoding import Encoding
from .samplers.gaussian_process import Kernel, Points, Scales, fit_scales

if TYPE_CHECKING:
    from ..estimator import Estimator, Hardware


ANOTHER_MODEL = 0.7
CHANGED = 0.9
"""The same model by name and sizes, with different code, data or trainer."""
ANOTHER_DEVICE = 0.5
ANOTHER_KIND_OF_DEVICE = 0.25
"""GPUs in one, a CPU in the other."""
PREDICTED = 0.2
"""One is simulated, the other measured: an earlier run is then only a prediction."""
EMULATED = 0.6
"""One is emulated, the other measured: ranks ran, and communication was priced."""
NUMBERS = {"devices": "devices", "seq_len": "tokens a sample", "global_batch": "samples a step"}
"""Compared numbers, with their description."""
DOUBLING = {"devices": 0.7, "seq_len": 0.85, "global_batch": 0.9}
"""Factor per doubling of each number."""
LEAST = 0.3
"""Smallest factor of a number."""


@dataclass(frozen=True, slots=True)
class TaskSimilarity:
    """Weight of an earlier run, and the reasons for it."""

    weight: float
    """Expected correlation, 0 to 1."""
    differences: tuple[str, ...] = ()
    """Differences of the tasks, as text."""

    def __str__(self) -> str:
        if not self.differences:
            return ""
        share = "half" if round(self.weight, 2) == 0.5 else f"{100 * self.weight:.0f} %"
        return f"at {share} weight: {', '.join(self.differences)}"


def task_similarity(there: Mapping[str, Any], here: Mapping[str, Any]) -> TaskSimilarity:
    """Returns the similarity of two requests, both as `asked` of run.yaml."""
    found = [*_model(there, here), *_device(there, here), *_simulation(there, here)]
    for name, words in NUMBERS.items():
        before, now = _number(there, name), _number(here, name)
        if before and now and before != now:
            factor = max(LEAST, DOUBLING[name] ** abs(math.log2(before / now)))
            found.append((factor, f"{before:g} {words} instead of {now:g}"))
    return TaskSimilarity(math.prod(factor for factor, _ in found), tuple(words for _, words in found))


def same_devices(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """True if two runs were on the same kind of devices, both measured or both simulated as one cluster, regardless of the
    number of devices.
    """
    return not _device(there, here) and not _simulation(there, here)


def _model(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = there.get("workload") or {}, here.get("workload") or {}
    names = [str(each.get("model")) for each in (there, here)]
    if "callable" in before or "callable" in now:
        if before.get("callable") == now.get("callable"):
            return []
        return [(ANOTHER_MODEL, f"another callable ({names[0]} -> {names[1]})")]
    if "command" in before or "command" in now:
        if all(before.get(each) == now.get(each) for each in ("command", "spec", "lora")):
            return []
        if now.get("spec") and all(before.get(each) == now.get(each) for each in ("spec", "lora")):
            return [(CHANGED, f"{now['spec']} is trained otherwise")]
        return [(ANOTHER_MODEL, f"another command ({names[0]} -> {names[1]})")]
    if before.get("id") == now.get("id"):
        return []
    if names[0] != names[1] or any(before.get(each) != now.get(each) for each in ("spec", "lora")):
        return [(ANOTHER_MODEL, f"another model ({names[0]} -> {names[1]})")]
    if all(there.get(each) == here.get(each) for each in ("seq_len", "global_batch")):
        return [(CHANGED, f"{names[1]} has changed since")]
    return []  # the sizes determine the similarity


def _device(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = there.get("devices") or {}, here.get("devices") or {}
    if before.get("name") == now.get("name"):
        return []
    words = f"({before.get('name')} -> {now.get('name')})"
    if before.get("type") != now.get("type"):
        return [(ANOTHER_KIND_OF_DEVICE, f"another kind of device {words}")]
    return [(ANOTHER_DEVICE, f"another device {words}")]


def _simulation(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = bool(there.get("simulated")), bool(here.get("simulated"))
    if before != now:
        return [(PREDICTED, "simulated there, measured here" if before else "measured there, simulated here")]
    if now and there.get("seed") != here.get("seed"):
        return [(PREDICTED, f"another simulated cluster (seed {there.get('seed')} -> {here.get('seed')})")]
    before, now = bool(there.get("emulated")), bool(here.get("emulated"))
    if before != now:
        return [(EMULATED, "emulated there, measured here" if before else "measured there, emulated here")]
    return []


def _number(asked: Mapping[str, Any], name: str) -> float | None:
    value = (asked.get("devices") or {}).get("used") if name == "devices" else asked.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


EXPECTED = Scales(joint=0.3, additive=0.3, noise=0.05)
"""Medians of the scales before fitting."""


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
        most_similar = weights[owner] == weights[owner].max()
        none = np.zeros((int(most_similar.sum()), 0))
        scales, _ = fit_scales(points[most_similar], values[most_similar], none, EXPECTED)
        self._kernel, self._points = Kernel(scales, points.shape[1]), Points.of(points)
        correlation = np.where(owner[:, None] == owner, 1.0, np.outer(weights[owner], weights[owner]))
        none = np.zeros((len(rows), 0))
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


def calibrations(
    earlier: "Sequence[Transferred]", hardware: "str | Path | Hardware | None", warn: Callable[[str], None]
) -> "list[Estimator | None]":
    """Returns the estimator of each earlier run's workload, with the factors of its trials; None for a run on other
    devices, or without predictions.

    Args:
        earlier: the earlier runs.
        hardware: hardware that the estimate of this search assumes.
        warn: receives a message about the calibration.
    """
    found = [_calibrated(each, hardware) for each in earlier]
    runs = sum(each is not None for each in found)
    if trials := sum(each.calibrated for each in found if each is not None):
        warn(f"the estimate is calibrated by {trials} trials of {runs} earlier run{'s'[: runs > 1]} on these devices")
    return found


def _calibrated(transferred: "Transferred", hardware: "str | Path | Hardware | None") -> "Estimator | None":
    asked = transferred.run.asked
    what = asked.get("workload") or {}
    spec = what.get("spec")
    # A user's file is not run to learn from it, and a command's steps are those of another trainer.
    if not transferred.same_devices or not spec or ".py" in spec or "command" in what:
        return None
    try:
        # A spec that is not an absolute path is a name, even if there is a file of that name now.
        named = spec if isabs(spec) else ServerModel.named(spec)
        model = resolve_workload(
            named, seq_len=asked.get("seq_len"), global_batch=asked.get("global_batch"), lora=what.get("lora")
        )
        space = Space.from_dict(asked["space"])
        accumulated = space.by_name.get("grad_accum")
        # What factors leave is interpolated by the prior, over the space of this search.
        return estimator_of(
            model,
            space,
            devices=asked["devices"]["used"],
            hardware=hardware,
            memory_limit_mib=asked.get("memory_limit_mib"),
            free_batch=accumulated is not None and not accumulated.derived,
        ).calibrate(transferred.run.trials, interpolate=False)
    except UsageError:  # a model that no longer exists, or a space of an earlier version
        return None


RATES = {"tokens/s", "samples/s"}
"""Units that differ only in level, which is not transferred."""
LEAST_WEIGHT = 0.05
"""Smallest weight of a run that is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Finished trials, in the conditions at the start of that run."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Its request, as in run.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """The part of an earlier run that counts."""

    run: EarlierRun
    same_devices: bool
    """True if its devices are like those of this search."""
    trials: tuple[Trial, ...]
    """Successful trials with values that this search's knobs have."""
    configs: tuple[Config, ...]
    """Their configurations in this search's space; only the free knobs are reliable."""
    weight: float
    """Similarity of the run to this search, 0 to 1."""
    summary: str
    """Summary of the transfer, its weight, and the matching and differing knobs, in a line."""


def read_runs(folders: Sequence[str | Path], own: str | Path | None = None) -> list[EarlierRun]:
    """Reads the finished trials of earlier runs, and their requests.

    Args:
        folders: folders of the runs.
        own: folder of the run that learns from them.

    Raises:
        UsageError: a folder contains no run, or no request, or is given twice, or is this run's own.
    """
    runs: list[EarlierRun] = []
    seen: set[Path] = set()
    for folder in folders:
        place = Path(folder).resolve()
        if own is not None and place == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume continues it")
        if place in seen:
            raise UsageError(f"warm start: {folder} is given twice; its trials count once")
        seen.add(place)
        try:
            view = View(folder, Config)
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        if view.document is None:
            raise UsageError(f"warm start: {folder} has no run.yaml, so the request of its run is unknown")
        # A refined configuration names single blocks and is outside every space.
        trials = [at_first_speed(each) for each in view.trials() if not each.pending and each.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


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
    knobs = set(encoding.names)
    their_knobs = {knob for trial in run.trials for knob in trial.config}
    shared = sorted(knobs & their_knobs)
    succeeded = [trial for trial in run.trials if trial.ok and (trial.measured.throughput or 0) > 0]
    trials, configs = [], []
    for trial in succeeded:
        here = Config({**default, **{knob: trial.config[knob] for knob in shared if knob in trial.config}})
        if encoding.encode(here) is not None:
            trials.append(trial)
            configs.append(here)
    like = task_similarity(run.asked, asked)
    reason = (
        _unlike(succeeded, shared, sorted(their_knobs), like)
        or _idle(trials, configs, shared)
        or _of_another_unit({trial.measured.unit for trial in trials}, unit)
    )
    if reason:
        raise UsageError(f"warm start from {run.name}: nothing can be taken: {reason}")
    share = f"{len(trials)} of {len(run.trials)} trials count" + (f", {like}" if like.differences else "")
    parts = [share, f"knobs in both: {', '.join(shared)}"]
    if only_here := sorted(knobs - their_knobs):
        parts.append(f"only here: {', '.join(only_here)}")
    if only_there := sorted(their_knobs - knobs - set(default)):
        parts.append(f"only there: {', '.join(only_there)}")
    if foreign := len(succeeded) - len(trials):
        parts.append(f"{foreign} have values that no knob has here")
    summary = f"warm start from {run.name}: {'; '.join(parts)}"
    return Transferred(
        run=run,
        same_devices=same_devices(run.asked, asked),
        trials=tuple(trials),
        configs=tuple(configs),
        weight=like.weight,
        summary=summary,
    )


def _unlike(succeeded: Sequence[Trial], shared: Sequence[str], their_knobs: Sequence[str], like: TaskSimilarity) -> str:
    if not succeeded:
        return "none of its trials succeeded"
    if not shared:
        return f"its knobs ({', '.join(their_knobs)}) are none of this search's"
    if like.weight < LEAST_WEIGHT:
        return f"it is too unlike: {', '.join(like.differences)}"
    return ""


def _idle(trials: Sequence[Trial], configs: Sequence[Config], shared: Sequence[str]) -> str:
    if not trials:
        return "all its trials have values that no knob has here"
    if len(set(configs)) < 2:
        return f"no knob that both have ({', '.join(shared)}) varies among its trials that succeeded"
    return ""


def _of_another_unit(there: set[str], here: str) -> str:
    there = there - {""}
    if len(there) > 1 and not there <= RATES:
        return f"its trials have several units ({', '.join(sorted(there))})"
    if here and not there <= {here} and not {here, *there} <= RATES:
        return f"it counts {', '.join(sorted(there))}, this search {here}"
    return ""
