"""How well runs are predicted: errors of time and memory, ranks, what is called unfit, before and after calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from redline.base.errors import RedlineError
from redline.estimator import Estimator
from redline.estimator.calibration import Correction, fit, leaves_node, memory_groups, time_groups
from redline.estimator.estimate import Z80
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.trainers import find_trainer

from .form import Run
from .reading import Source


@dataclass
class Judged:
    """Runs with their predictions."""

    runs: list[Run]
    estimators: list[Estimator]
    """That of each run."""
    configs: list[Mapping[str, Any]]
    """What each run is taken to have been."""
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failed = np.array([run.failed for run in self.runs], bool)
        self.step = np.array([run.step_ms or np.nan for run in self.runs], float)
        self.memory = np.array([run.memory_mib or np.nan for run in self.runs], float)
        self.groups = [f"{run.hardware.name}" for run in self.runs]
        self._alike: dict[int, list[int]] = {}
        for at, made in enumerate(self.estimators):
            self._alike.setdefault(id(made), []).append(at)
        self.predicted = self._predict(None, None)

    def _predict(self, time: Correction | None, memory: Correction | None) -> pd.DataFrame:
        out: dict[str, np.ndarray] = {}
        for at in self._alike.values():
            made = self.estimators[at[0]]
            if time is not None or memory is not None:
                made = made.corrected(time, memory)
            table = made.table([self.configs[each] for each in at])
            found = {
                "step": table.step_ms, "time_std": table.log_throughput_std, "throughput": table.throughput,
                "memory": np.minimum(table.peak_memory_mib, table.memory_limit_mib), "memory_std": table.log_memory_std,
                "fullest": table.fullest_memory_mib, "fits": table.fits, "chance": table.probability_fits,
            }  # fmt: skip
            for name, value in found.items():
                out.setdefault(name, np.zeros(len(self.runs)))[at] = value
        return pd.DataFrame(out)

    def errors(self, predicted: pd.DataFrame | None = None, keep: np.ndarray | None = None) -> dict[str, float]:
        """The columns of the report."""
        said = self.predicted if predicted is None else predicted
        keep = np.ones(len(self.runs), bool) if keep is None else keep
        out: dict[str, float] = {"rows": float(keep.sum())}
        if not keep.any():
            return out
        for name, measured, made in (("time", self.step, said["step"]), ("memory", self.memory, said["memory"])):
            at = keep & np.isfinite(measured) & np.isfinite(made.to_numpy()) & ~self.failed
            out[f"{name}_rows"] = float(at.sum())
            if at.any():
                ratio = made.to_numpy()[at] / measured[at]
                std = said[f"{name}_std"].to_numpy()[at]
                out |= {
                    f"{name}_median": float(np.median(np.abs(ratio - 1))),
                    f"{name}_mean": float(np.mean(np.abs(ratio - 1))),
                    f"{name}_bias": float(np.median(ratio) - 1),
                    f"{name}_cover": float(np.mean(np.abs(np.log(ratio)) <= Z80 * std)),
                }
        at = keep & np.isfinite(self.step)
        if at.sum() > 2:
            from scipy.stats import kendalltau

            devices = np.array([run.devices_of(config) for run, config in zip(self.runs, self.configs)])
            measured = said["throughput"] * said["step"] / self.step
            out["tau"] = float(kendalltau((said["throughput"] / devices)[at], (measured / devices)[at]).statistic)
        ran, failed = keep & ~self.failed, keep & self.failed
        if ran.any():
            out["unfit"] = float(np.mean(said["fits"].to_numpy()[ran] == 0))
        out["failed"] = float(failed.sum())
        if failed.any() and ran.any():
            chance = said["chance"].to_numpy()
            out["auc"] = auc(-chance[ran], -chance[failed])
        return out

    def calibrated(self, count: int, seeds: int) -> dict[str, float]:
        """The same after `count` random rows of each device, on the rest; means over seeds. Devices of which there are no
        more rows than those and one have no part in it."""
        found = [self._after(count, seed) for seed in range(seeds)]
        names = {name for each in found for name in each}
        return {name: float(np.nanmean([each.get(name, np.nan) for each in found])) for name in names} or {"rows": 0.0}

    def _after(self, count: int, seed: int) -> dict[str, float]:
        made = self.predicted.copy()
        keep = np.zeros(len(self.runs), bool)
        random = np.random.default_rng(seed)
        for device in dict.fromkeys(self.groups):
            here = np.array([each == device for each in self.groups])
            usable = np.flatnonzero(here & np.isfinite(self.step) & np.isfinite(made["step"].to_numpy()))
            if len(usable) <= count + 1:
                continue
            chosen = random.permutation(usable)[:count]
            new = self._predict(*self._fitted(chosen))
            made.loc[here] = new.loc[here]
            keep |= here
            keep[chosen] = False
        return self.errors(made, keep) if keep.any() else {}

    def _fitted(self, chosen: np.ndarray) -> tuple[Correction | None, Correction | None]:
        """What these rows say of time and memory, whatever models they are of."""
        times, memories, noises = [], [], []
        for at in chosen:
            made = self.estimators[at]
            cols = knob_arrays([self.configs[at]], made.training)
            time, memory, _, _ = made._raw(cols)
            times.append(time_groups(time, leaves_node(cols, made.hardware.devices_per_node))[0])
            memories.append(memory_groups(memory)[0])
            noises.append(float(np.ravel(made._time_noise(cols))[0]))
        made = self.estimators[chosen[0]]
        known = np.isfinite(self.memory[chosen])
        time = fit(np.array(times), self.step[chosen], made._time_prior(), np.array(noises))
        if not known.any():
            return time, None
        peaks = np.array(memories)[known]
        return time, fit(peaks, self.memory[chosen][known], made._memory_prior(), made.constants.memory_noise)

    def rows(self) -> pd.DataFrame:
        """Every run: where it is, its knobs, what was measured and predicted."""
        said = self.predicted
        return pd.DataFrame({
            "where": [run.where for run in self.runs],
            "model": [run.model.name for run in self.runs],
            "hardware": [run.hardware.name for run in self.runs],
            "knobs": [" ".join(f"{k}={v}" for k, v in each.items() if v is True or v not in (1, 0)) for each in self.configs],
            "seq": [made.training.seq_len for made in self.estimators],
            "step_ms": self.step.round(1),
            "time": (said["step"] / self.step - 1).round(3),
            "memory_gib": (self.memory / 1024).round(1),
            "memory": (said["memory"] / self.memory - 1).round(3),
            "fullest_gib": (said["fullest"] / 1024).round(1),
            "fits": said["fits"].astype(bool),
            "failed": self.failed,
        })  # fmt: skip


def auc(good: np.ndarray, bad: np.ndarray) -> float:
    """Chance that a failure has a higher score than a success; ties count half."""
    ranks = pd.Series(np.concatenate([good, bad])).rank().to_numpy()
    return float((ranks[len(good) :].sum() - len(bad) * (len(bad) + 1) / 2) / (len(good) * len(bad)))


def judge(source: Source) -> Judged:
    """Predicts the runs of a source; those that the estimator refuses are left out."""
    made: dict[str, Estimator] = {}
    runs, estimators, configs, left = [], [], [], []
    for run in source.runs:
        key = repr((run.model, run.hardware, run.framework, sorted(run.setup.items(), key=lambda item: item[0])))
        try:
            if key not in made:
                training = find_trainer(run.framework).training(**run.setup)
                made[key] = Estimator(run.model, run.hardware, training, framework=run.framework)
            config = _chosen(run, made[key])
            made[key].table([config])
        except RedlineError as error:
            left.append(f"{run.where}: {error}")
            continue
        runs.append(run)
        estimators.append(made[key])
        configs.append(config)
    return Judged(runs, estimators, configs, left)


def _chosen(run: Run, estimator: Estimator) -> Mapping[str, Any]:
    """Of what the source leaves open the fastest that fits, else what needs least."""
    if not run.choices:
        return run.config
    options = [{**run.config, **each} for each in run.choices]
    table = estimator.table(options)
    time = np.where(table.fits, table.step_ms, np.inf)
    return options[int(np.argmin(time) if np.isfinite(time).any() else np.argmin(table.fullest_memory_mib))]
