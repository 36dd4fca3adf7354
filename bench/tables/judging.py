"""Accuracy of predictions for runs: errors of time and memory, ranks, and failures, before and after calibration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from redline.base.errors import RedlineError
from redline.estimator import Constants, Estimator
from redline.estimator.calibration import REACH, Correction, fit, leaves_node, memory_groups, time_groups
from redline.estimator.estimate import Z80
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.trainers import find_trainer
from scipy.special import ndtr

from .form import Run
from .reading import Source

_PREDICTED = (
    *("step", "time_std", "throughput", "memory", "memory_std"),
    *("fullest", "fits", "chance", "seq_len"),
)


@dataclass
class Judged:
    """Runs with their predictions."""

    runs: list[Run]
    configs: list[Mapping[str, Any]]
    """The assumed configuration of each run."""
    predicted: pd.DataFrame
    """Predictions before any measurement, with a row for each run."""
    parts: "Parts"
    """The parts that calibration corrects."""
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failed = np.array([run.failed for run in self.runs], bool)
        self.step = np.array([run.step_ms or np.nan for run in self.runs], float)
        self.memory = np.array([run.memory_mib or np.nan for run in self.runs], float)
        self.groups = np.array([run.hardware.name for run in self.runs], object)

    def errors(self, predicted: pd.DataFrame | None = None, keep: np.ndarray | None = None) -> dict[str, float]:
        """Returns the columns of the report."""
        predictions = self.predicted if predicted is None else predicted
        keep = np.ones(len(self.runs), bool) if keep is None else keep
        out: dict[str, float] = {"rows": float(keep.sum())}
        if not keep.any():
            return out
        for name, measured, made in (
            ("time", self.step, predictions["step"]),
            ("memory", self.memory, predictions["memory"]),
        ):
            at = keep & np.isfinite(measured) & np.isfinite(made.to_numpy()) & ~self.failed
            out[f"{name}_rows"] = float(at.sum())
            if at.any():
                ratio = made.to_numpy()[at] / measured[at]
                std = predictions[f"{name}_std"].to_numpy()[at]
                out |= {
                    f"{name}_median": float(np.median(np.abs(ratio - 1))),
                    f"{name}_mean": float(np.mean(np.abs(ratio - 1))),
                    f"{name}_bias": float(np.median(ratio) - 1),
                    f"{name}_cover": float(np.mean(np.abs(np.log(ratio)) <= Z80 * std)),
                }
        at = keep & np.isfinite(self.step)
        if at.sum() > 2:
            devices = np.array([run.devices_of(config) for run, config in zip(self.runs, self.configs)])
            measured = predictions["throughput"] * predictions["step"] / self.step
            out["tau"] = kendall(
                (predictions["throughput"] / devices).to_numpy()[at], (measured / devices).to_numpy()[at]
            )
        ran, failed = keep & ~self.failed, keep & self.failed
        if ran.any():
            out["unfit"] = float(np.mean(predictions["fits"].to_numpy()[ran] == 0))
        out["failed"] = float(failed.sum())
        if failed.any() and ran.any():
            chance = predictions["chance"].to_numpy()
            out["auc"] = auc(-chance[ran], -chance[failed])
        return out

    def calibrated(self, count: int, seeds: int) -> dict[str, float]:
        """Returns the columns after `count` random rows of each device, for the other rows, as means over seeds.

        Devices with at most one row more than that are left out.
        """
        found = [self._after(count, seed) for seed in range(seeds)]
        names = {name for each in found for name in each}
        values = {name: [each[name] for each in found if np.isfinite(each.get(name, np.nan))] for name in names}
        return {name: float(np.mean(some)) for name, some in values.items() if some} or {"rows": 0.0}

    def _after(self, count: int, seed: int) -> dict[str, float]:
        made = self.predicted.copy()
        keep = np.zeros(len(self.runs), bool)
        random = np.random.default_rng(seed)
        for device in dict.fromkeys(self.groups):
            here = self.groups == device
            usable = np.flatnonzero(here & np.isfinite(self.step) & np.isfinite(made["step"].to_numpy()))
            if len(usable) <= count + 1:
                continue
            chosen = random.permutation(usable)[:count]
            for name, value in self.parts.corrected(made, chosen, self.step, self.memory).items():
                made.loc[here, name] = value[here]
            keep |= here
            keep[chosen] = False
        return self.errors(made, keep) if keep.any() else {}

    def rows(self) -> pd.DataFrame:
        """Returns every run with its place, its knobs, its measurements and predictions."""
        predictions = self.predicted
        return pd.DataFrame({
            "where": [run.where for run in self.runs],
            "model": [run.model.name for run in self.runs],
            "hardware": [run.hardware.name for run in self.runs],
            "knobs": [" ".join(f"{k}={v}" for k, v in each.items() if v is True or v not in (1, 0)) for each in self.configs],
            "seq": predictions["seq_len"],
            "step_ms": self.step.round(1),
            "time": (predictions["step"] / self.step - 1).round(3),
            "memory_gib": (self.memory / 1024).round(1),
            "memory": (predictions["memory"] / self.memory - 1).round(3),
            "fullest_gib": (predictions["fullest"] / 1024).round(1),
            "fits": predictions["fits"].astype(bool),
            "failed": self.failed,
        })  # fmt: skip


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Returns Kendall's rank correlation (tau-b): pairs in the same order minus pairs in the opposite one, without ties."""
    first, second = (np.sign(each[:, None] - each[None, :]) for each in (a, b))
    pairs = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / pairs) if pairs else float("nan")


def auc(good: np.ndarray, bad: np.ndarray) -> float:
    """Returns the probability that a failure has a higher score than a success; ties count half."""
    ranks = pd.Series(np.concatenate([good, bad])).rank().to_numpy()
    return float((ranks[len(good) :].sum() - len(bad) * (len(bad) + 1) / 2) / (len(good) * len(bad)))


@dataclass
class Parts:
    """The terms of predictions, as arrays with a row for each run."""

    time: np.ndarray
    """Seconds by the groups of `redline.estimator.calibration`."""
    memory: np.ndarray
    """Memory of the reported rank."""
    fullest: np.ndarray
    features: np.ndarray
    """Numbers that are close for similar runs: of knobs and the sequence length, and of other models and products far apart."""
    noise: np.ndarray
    """Noise of the logarithm of a step time."""
    memory_noise: np.ndarray
    limit: np.ndarray
    priors: list[tuple[np.ndarray, np.ndarray]]
    """Priors of time and memory."""

    def corrected(
        self, before: pd.DataFrame, chosen: np.ndarray, step: np.ndarray, memory: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns the columns of a prediction after these rows, of any model, were measured.

        The cost of an allocator that is nearly full keeps its first prediction.
        """
        prior, memory_prior = self.priors[chosen[0]]
        features = self.features
        time = fit(self.time[chosen], step[chosen], prior, self.noise[chosen], features=features[chosen])
        made, std = time.apply(self.time, self.noise, time.interpolate(features, self.noise))
        spread = before["time_std"].to_numpy() ** 2 - Correction.none(prior).apply(self.time, self.noise)[1] ** 2
        ratio = np.where(np.isfinite(made), before["step"].to_numpy(), 0.0) / made
        out = {"step": made, "time_std": np.sqrt(std**2 + np.maximum(spread, 0.0))}
        out["throughput"] = before["throughput"].to_numpy() * ratio
        known = chosen[np.isfinite(memory[chosen])]
        if len(known):
            found = fit(
                self.memory[known], memory[known], memory_prior, self.memory_noise[known], features=features[known]
            )
            left = found.interpolate(features, self.memory_noise)
            peak, out["memory_std"] = found.apply(self.memory, self.memory_noise, left)
            out["fullest"], full_std = found.apply(self.fullest, self.memory_noise, left)
            out["memory"] = np.minimum(peak, self.limit)
            out["fits"] = (out["fullest"] <= self.limit).astype(float)
            out["chance"] = ndtr(np.log(self.limit / out["fullest"]) / full_std)
        return out


def judge(source: Source, constants: Callable[[Run], Constants] | None = None) -> Judged:
    """Predicts the runs of a source, without those that the estimator refuses.

    Args:
        constants: in place of those of a run's framework; the same for runs of one framework and device.
    """
    alike: dict[str, list[Run]] = {}
    for run in source.runs:
        key = repr((run.model, run.hardware, run.framework, sorted(run.setup.items(), key=lambda item: item[0])))
        alike.setdefault(key, []).append(run)
    runs, configs, left, tables, parts = [], [], [], [], []
    for some in alike.values():
        first = some[0]
        try:
            training = find_trainer(first.framework).training(**first.setup)
            own = constants(first) if constants else None
            estimator = Estimator(first.model, first.hardware, training, framework=first.framework, constants=own)
        except RedlineError as error:
            left += [f"{run.where}: {error}" for run in some]
            continue
        for batch in [some] if _together(estimator, some) else [[run] for run in some]:
            try:
                made = [_chosen(run, estimator) for run in batch]
                table, part = _predicted(estimator, made)
            except RedlineError as error:
                left.append(f"{batch[0].where}: {error}")
                continue
            runs += batch
            configs += made
            tables.append(table)
            parts.append(part)
    stacked: dict[str, Any] = {"priors": [each for part in parts for each in part.priors]}
    if parts:
        stacked["features"] = np.hstack([np.concatenate([part.features for part in parts]), _models(runs)])
    for name in Parts.__dataclass_fields__:
        if name not in stacked:
            stacked[name] = np.concatenate([getattr(each, name) for each in parts]) if parts else np.zeros(0)
    predictions = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=_PREDICTED, dtype=float)
    return Judged(runs, configs, predictions, Parts(**stacked), left)


def _models(runs: list[Run]) -> np.ndarray:
    """Features by which runs of other models and number formats have a correlation of 0.3; shape (runs, kinds)."""
    kinds = [(run.model.name, run.setup.get("products")) for run in runs]
    known = {kind: at for at, kind in enumerate(dict.fromkeys(kinds))}
    apart = REACH * np.sqrt(np.log(1 / 0.3))
    return apart * np.eye(len(known))[[known[kind] for kind in kinds]]


def _together(estimator: Estimator, runs: list[Run]) -> bool:
    """Returns True if the estimator refuses none of them."""
    try:
        knob_arrays([{**run.config, **(run.choices[0] if run.choices else {})} for run in runs], estimator.training)
    except RedlineError:
        return False
    return len({tuple(sorted(run.config)) for run in runs}) == 1


def _predicted(made: Estimator, configs: list[Mapping[str, Any]]) -> tuple[pd.DataFrame, Parts]:
    """Returns predictions and their parts."""
    cols = knob_arrays(configs, made.training)
    raw = made._raw(cols)
    table = made._tabled(cols, raw)
    count = len(configs)
    return pd.DataFrame({
        "step": table.step_ms, "time_std": table.log_throughput_std, "throughput": table.throughput,
        "memory": np.minimum(table.peak_memory_mib, table.memory_limit_mib), "memory_std": table.log_memory_std,
        "fullest": table.fullest_memory_mib, "fits": table.fits.astype(float), "chance": table.probability_fits,
        "seq_len": made.training.seq_len,
    }), Parts(
        time=time_groups(raw[0], leaves_node(cols, made.hardware.devices_per_node)),
        features=np.hstack([cols.features, np.full((count, 1), np.log2(made.training.seq_len or 1))]),
        memory=memory_groups(raw[1]),
        fullest=memory_groups(raw[2]),
        noise=np.broadcast_to(np.asarray(made._time_noise(cols), float), (count,)),
        memory_noise=np.full(count, made.constants.memory_noise),
        limit=np.full(count, made.memory_limit_mib),
        priors=[(made._time_prior(), made._memory_prior())] * count,
    )  # fmt: skip


def _chosen(run: Run, estimator: Estimator) -> Mapping[str, Any]:
    """Returns the fastest choice that fits among those that the source does not state, otherwise the smallest."""
    if not run.choices:
        return run.config
    options = [{**run.config, **each} for each in run.choices]
    table = estimator.table(options)
    time = np.where(table.fits, table.step_ms, np.inf)
    return options[int(np.argmin(time) if np.isfinite(time).any() else np.argmin(table.fullest_memory_mib))]
