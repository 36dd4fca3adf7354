"""Transfer from earlier runs: which count here, how similar their task is, and what they say of untried configurations.

The weight of an earlier run is the expected correlation between deviations from the mean there and here: a product of one
factor for each thing that differs. The factors of model and devices are those of recorded tables (`bench/warm_start.py
--correlations`, log throughput of the same configurations of nanotron on 8 to 512 H100: 0.71 between two models; 0.69, 0.50,
0.32 and 0.35 where the devices differ by a factor of 2, 4, 8 and 16); the others are set relative to these. The weight is a
starting value, which the search corrects from its own trials.

Notation, logarithms throughout:

    f(x)      deviation from the estimate, or without one from the mean, at configuration x of this search
    f_r(x)    the same in the earlier run r, of which y_j was observed at x_j, with noise s
    w_r       similarity of run r to this one, 0 to 1: the correlation of f_r with f
    k         covariance of f; f and f_r have w_r k, two runs w_r w_q k, a run with itself k

The mean of f is m(x) = sum_j w_r(j) k(x, x_j) a_j with a = (k * W + s^2 I)^-1 y, where W has 1 within a run and w_r w_q
between two: a run half as similar moves half as much, and a long run does not count for more.
Source: Bonilla, Chai and Williams, "Multi-task Gaussian Process Prediction" (2008), with the correlations given.
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
from ..space import Config, Space
from .history import REFINEMENT
from .predicting import estimator_of
from .samplers.encoding import Encoding
from .samplers.gaussian_process import Kernel, Points, Scales, fit_scales

if TYPE_CHECKING:
    from ..estimator import Estimator, Hardware


ANOTHER_MODEL = 0.7
CHANGED = 0.9
"""The same model by name and sizes, whose code, data or trainer are not the same."""
ANOTHER_DEVICE = 0.5
ANOTHER_KIND_OF_DEVICE = 0.25
"""GPUs there, a CPU here."""
PREDICTED = 0.2
"""Simulated there and measured here, or the reverse: an earlier run is then no more than a prediction."""
EMULATED = 0.6
"""Emulated there and measured here, or the reverse: ranks were run, and communication was priced."""
NUMBERS = {"devices": "devices", "seq_len": "tokens a sample", "global_batch": "samples a step"}
"""What is compared as a number, in words."""
DOUBLING = {"devices": 0.7, "seq_len": 0.85, "global_batch": 0.9}
"""For each factor of two between the two."""
LEAST = 0.3
"""What of a number can differ at the most."""


@dataclass(frozen=True, slots=True)
class TaskSimilarity:
    """How much an earlier run counts, and why not fully."""

    weight: float
    """Expected correlation, 0 to 1."""
    differences: tuple[str, ...] = ()
    """What differs, in words."""

    def __str__(self) -> str:
        if not self.differences:
            return ""
        share = "half" if round(self.weight, 2) == 0.5 else f"{100 * self.weight:.0f} %"
        return f"at {share} weight: {', '.join(self.differences)}"


def task_similarity(there: Mapping[str, Any], here: Mapping[str, Any]) -> TaskSimilarity:
    """How much a run that was asked `there` says of one that is asked `here`; both as run.yaml's `asked`."""
    found = [*_model(there, here), *_device(there, here), *_simulation(there, here)]
    for name, words in NUMBERS.items():
        before, now = _number(there, name), _number(here, name)
        if before and now and before != now:
            factor = max(LEAST, DOUBLING[name] ** abs(math.log2(before / now)))
            found.append((factor, f"{before:g} {words} instead of {now:g}"))
    return TaskSimilarity(math.prod(factor for factor, _ in found), tuple(words for _, words in found))


def same_devices(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two runs were on devices alike, both measured or both simulated as one cluster, however many they used."""
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
    return []  # of which the sizes tell


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
"""Medians of the scales before they are fitted."""


class Transfer:
    """The mean of f given what the earlier runs observed of f_r.

    Args:
        points: of the observations, shape (n, columns).
        values: y, shape (n,); NaN where nothing was observed.
        owner: the run of each, shape (n,).
        weights: w of each run, shape (runs,).
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, owner: np.ndarray, weights: np.ndarray) -> None:
        rows = np.flatnonzero(np.isfinite(values))
        points, values, owner = points[rows], values[rows], owner[rows]
        self._runs, self._kernel = len(weights), None
        if not len(rows):
            return
        # What runs less alike say of the scales would be mostly how they differ.
        alike = weights[owner] == weights[owner].max()
        none = np.zeros((int(alike.sum()), 0))
        scales, _ = fit_scales(points[alike], values[alike], none, EXPECTED)
        self._kernel, self._points = Kernel(scales, points.shape[1]), Points.of(points)
        correlation = np.where(owner[:, None] == owner, 1.0, np.outer(weights[owner], weights[owner]))
        none = np.zeros((len(rows), 0))
        covariance = self._kernel.between(self._points, self._points, none, none) * correlation
        covariance[np.diag_indices(len(rows))] += scales.noise**2 + 1e-8
        moved = weights[owner] * np.linalg.solve(covariance, values)
        self._moved = moved[:, None] * (owner[:, None] == np.arange(self._runs))
        """w a, in the column of the run it is of: shape (n, runs)."""

    def parts(self, at: np.ndarray) -> np.ndarray:
        """What each run adds to the mean at points (m, columns): shape (m, runs); 0 far from what it saw."""
        if self._kernel is None:
            return np.zeros((len(at), self._runs))
        none_at, none = np.zeros((len(at), 0)), np.zeros((self._points.rows, 0))
        return self._kernel.between(at, self._points, none_at, none) @ self._moved


def calibrations(
    earlier: "Sequence[Transferred]", hardware: "str | Path | Hardware | None", warn: Callable[[str], None]
) -> "list[Estimator | None]":
    """For each earlier run the estimator of what it trained, with what it measured; None for a run on other devices, or
    of which nothing can be predicted.

    Args:
        earlier: what counts of earlier runs.
        hardware: what the estimate of this search takes the devices for.
        warn: told what the runs say of the devices.
    """
    found = [_calibrated(each, hardware) for each in earlier]
    runs = sum(each is not None for each in found)
    if trials := sum(each.calibrated for each in found if each is not None):
        warn(
            f"the estimate begins with what {trials} trials of {runs} earlier run{'s'[: runs > 1]} say of these devices"
        )
    return found


def _calibrated(taken: "Transferred", hardware: "str | Path | Hardware | None") -> "Estimator | None":
    asked = taken.run.asked
    what = asked.get("workload") or {}
    spec = what.get("spec")
    # Somebody's file is not run to learn from it, and a command's steps are another trainer's.
    if not taken.same_devices or not spec or ".py" in spec or "command" in what:
        return None
    try:
        # What is not a path from the root on is a name, even where there is a file of that name now.
        named = spec if isabs(spec) else ServerModel.named(spec)
        model = resolve_workload(
            named, seq_len=asked.get("seq_len"), global_batch=asked.get("global_batch"), lora=what.get("lora")
        )
        space = Space.from_dict(asked["space"])
        accumulated = space.by_name.get("grad_accum")
        return estimator_of(
            model,
            space,
            devices=asked["devices"]["used"],
            hardware=hardware,
            memory_limit_mib=asked.get("memory_limit_mib"),
            free_batch=accumulated is not None and not accumulated.derived,
        ).calibrate(taken.run.trials)
    except UsageError:  # a model that is no more there, a space of an earlier version
        return None


RATES = {"tokens/s", "samples/s"}
"""Units between which only the level differs, of which nothing is taken."""
LEAST_WEIGHT = 0.05
"""Of a run that is taken at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Finished trials."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What it was asked, as run.yaml keeps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """What of an earlier run counts."""

    run: EarlierRun
    """The run."""
    same_devices: bool
    """Whether it was on devices like those of this search."""
    trials: tuple[Trial, ...]
    """Those that succeeded, with values that this search's knobs have."""
    configs: tuple[Config, ...]
    """Where each of them is in this search's space; only the free knobs are to be relied on."""
    weight: float
    """How alike the run is to this search, 0 to 1."""
    said: str
    """What was taken, how much it counts, what matched and what did not, in a line."""


def read_runs(folders: Sequence[str | Path], own: str | Path | None = None) -> list[EarlierRun]:
    """The finished trials of earlier runs, and what these were asked.

    Args:
        folders: of the runs.
        own: the folder of the run that is to learn from them.

    Raises:
        UsageError: a folder holds no run, does not say what was asked, is there twice, or is this run's own.
    """
    runs: list[EarlierRun] = []
    seen: set[Path] = set()
    for folder in folders:
        place = Path(folder).resolve()
        if own is not None and place == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume goes on with what it holds")
        if place in seen:
            raise UsageError(f"warm start: {folder} is there twice; its trials count once")
        seen.add(place)
        try:
            view = View(folder, Config)
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        if view.document is None:
            raise UsageError(f"warm start: {folder} has no run.yaml, so what it measured is not known")
        # What names single blocks is beyond every space.
        trials = [each for each in view.trials() if not each.pending and each.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


def take(run: EarlierRun, space: Space, asked: Mapping[str, Any], unit: str = "") -> Transferred:
    """What of a run counts in a search.

    Args:
        run: the earlier run.
        space: of the search.
        asked: what the search is asked, as run.yaml keeps it.
        unit: of the search's throughput; empty where it is not known.

    Raises:
        UsageError: there is nothing sensible to take; the message says why.
    """
    encoding, default = Encoding(space), space.default()
    knobs = set(encoding.names)
    theirs = {knob for trial in run.trials for knob in trial.config}
    shared = sorted(knobs & theirs)
    succeeded = [trial for trial in run.trials if trial.ok and (trial.measured.throughput or 0) > 0]
    trials, configs = [], []
    for trial in succeeded:
        here = Config({**default, **{knob: trial.config[knob] for knob in shared if knob in trial.config}})
        if encoding.encode(here) is not None:
            trials.append(trial)
            configs.append(here)
    like = task_similarity(run.asked, asked)
    why = (
        _unlike(succeeded, shared, sorted(theirs), like)
        or _idle(trials, configs, shared)
        or _of_another_unit({trial.measured.unit for trial in trials}, unit)
    )
    if why:
        raise UsageError(f"warm start from {run.name}: nothing can be taken: {why}")
    parts = [_share(len(trials), len(run.trials), like), f"knobs in both: {', '.join(shared)}"]
    if only_here := sorted(knobs - theirs):
        parts.append(f"only here: {', '.join(only_here)}")
    if only_there := sorted(theirs - knobs - set(default)):
        parts.append(f"only there: {', '.join(only_there)}")
    if foreign := len(succeeded) - len(trials):
        parts.append(f"{foreign} have values that no knob has here")
    said = f"warm start from {run.name}: {'; '.join(parts)}"
    return Transferred(
        run=run,
        same_devices=same_devices(run.asked, asked),
        trials=tuple(trials),
        configs=tuple(configs),
        weight=like.weight,
        said=said,
    )


def _share(count: int, of: int, like: TaskSimilarity) -> str:
    return f"{count} of {of} trials count" + (f", {like}" if like.differences else "")


def _unlike(succeeded: Sequence[Trial], shared: Sequence[str], theirs: Sequence[str], like: TaskSimilarity) -> str:
    if not succeeded:
        return "none of its trials succeeded"
    if not shared:
        return f"its knobs ({', '.join(theirs)}) are none of this search's"
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
