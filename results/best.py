"""best.yaml: the winner, with the data needed to check and reproduce it."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isabs
from pathlib import Path
from typing import Any

from ..base.errors import NothingFound, StudyError, UsageError
from ..knobs.lossy import lossy_values
from . import schema, summary
from .measurement import PLANNED, Measurement, Status, Trial
from .names import BEST, holds_run

TRAINS = ("model", "workload", "shape", "seq_len", "global_batch", "memory_limit_mib", "simulated", "emulated")
"""Keys of a run's request that define the training and its memory limit."""
OF_DEVICES = ("type", "name", "used", "per_host", "memory_mib")
"""Keys of its devices that are kept with them."""


def document(
    trials: Sequence[Trial],
    *,
    command: Sequence[str],
    environment: Mapping[str, Any],
    request: Mapping[str, Any] | None = None,
    again_s: float | None = None,
    folder: Path = Path(),
    stopped: str = "",
) -> dict[str, Any]:
    """Returns the contents of best.yaml for these trials.

    `best` is the winner, or null with the reason in `why`; `default` is the default configuration, `gain` the winner's
    throughput over the default's, and `gain_interval` its 95 % interval. A winner that failed when it was measured again
    has the failure in `unconfirmed`. If lossy values were tried, `best_exact` is the best configuration without any, and
    `lossy` lists a configuration's. Measurements include re-measurements. `trains` has the keys of `request` (`asked` of
    run.yaml) that a training from this file alone needs; `spec` of a workload in a file is relative to `folder`, that of
    best.yaml, and `spec_there` its absolute path. `stopped` is the reason why a search was ended early. `seconds_again` is
    the time of measuring the leaders again, `again_s`. `reproduce` is the command line, quoted for a shell.
    """
    winner, base = summary.best(trials), summary.default(trials)
    contents: dict[str, Any] = {"stopped": stopped} if stopped else {}
    contents["best"] = _entry(winner) if winner else None
    if winner is None:
        contents["why"] = summary.why_nothing(trials)
    contents["default"] = _entry(base) if base else None
    gain = summary.gain(trials)
    contents["gain"] = gain and gain.ratio
    contents["gain_interval"] = list(gain.interval) if gain and gain.interval else None
    if any(trial.lossy for trial in trials):
        exact = summary.best_exact(trials)
        contents["best_exact"] = _entry(exact) if exact else None
    if again_s:
        contents["seconds_again"] = round(again_s, 1)
    if request:
        contents["trains"] = _trains(request, folder)
    contents["trials"] = {str(status): count for status, count in summary.counts(trials).items() if count}
    contents["environment"] = dict(environment)
    contents["reproduce"] = shlex.join(command)
    return contents


def _trains(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    training = {name: request[name] for name in TRAINS if request.get(name) is not None}
    workload = training.get("workload") or {}
    file, _, name = str(workload.get("spec") or "").rpartition(":")
    if file.endswith(".py") and isabs(file):
        spec = {"spec": f"{os.path.relpath(file, folder.resolve())}:{name}", "spec_there": f"{file}:{name}"}
        training["workload"] = {**workload, **spec}
    devices = request.get("devices") or {}
    return training | {"devices": {name: devices[name] for name in OF_DEVICES if devices.get(name) is not None}}


def _entry(trial: Trial) -> dict[str, Any]:
    config = trial.config
    entry: dict[str, Any] = {"trial": trial.number}
    if hasattr(config, "id"):
        entry["id"] = config.id
    entry["configuration"] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    if trial.lossy:
        entry["lossy"] = lossy_values(config, trial.lossy)
    entry["sampler"] = trial.sampler
    if trial.measurement is None:
        return entry | {"status": "pending"}
    entry["status"] = trial.measured.status
    if trial.ok:
        entry["throughput"] = trial.throughput
        entry["unit"] = trial.measured.unit
    if trial.measured.unconfirmed:
        entry["unconfirmed"] = trial.measured.unconfirmed
    if trial.remeasured:
        entry["remeasured"] = list(trial.remeasured)
        entry["first_throughput"] = trial.first
    prediction = {"throughput": trial.predicted_throughput, "memory_mib": trial.predicted_memory_mib}
    entry["prediction"] = {name: value for name, value in prediction.items() if value is not None} or None
    entry["measurement"] = trial.measured.figures()
    return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """A file with a configuration: a best.yaml outside its run, or a plan of `redline estimate`."""

    trial: Trial
    """The configuration, with its measurement or prediction."""
    document: Mapping[str, Any]
    """The training and the devices, in the form of run.yaml."""
    others: tuple[Mapping[str, Any], ...] = ()
    """Configurations of the other plans for as many devices."""

    @property
    def trains(self) -> Mapping[str, Any]:
        """The training and the devices."""
        request: Mapping[str, Any] = self.document["asked"]
        return request


def is_plan(path: Path) -> bool:
    """True if `load` applies to the file: YAML, except the best.yaml in its run's folder."""
    is_yaml = path.name.endswith((".yaml", ".yml")) and path.is_file()
    return is_yaml and (path.name != BEST or not holds_run(path.parent))


def load(path: Path) -> PlanFile:
    """Reads a best.yaml outside its run, or a plan of `redline estimate`.

    Raises:
        StudyError: it is another file, or cannot be read.
        NothingFound: it has no winner.
    """
    document = schema.read_mapping(path.parent, path.name)
    if "best" in document and document["best"] is None:
        raise NothingFound(f"'{path}' names no winner: {document.get('why', 'its search found none')}")
    contents, _ = schema.clean(document, schema.BEST, path.name)
    winner = contents.get("best") or {}
    if not winner.get("configuration"):
        raise StudyError(
            f"'{path}' is neither a best.yaml of redline nor a plan of `redline estimate -o`: "
            "it has no best with a configuration"
        )
    request = dict(contents.get("trains") or {}) | {
        name: True for name in ("simulated", "emulated") if contents.get(name)
    }
    workload = dict(request.get("workload") or {})
    if (there := workload.pop("spec_there", None)) is not None:
        file, _, name = str(workload.get("spec")).rpartition(":")
        local = os.path.abspath(path.parent / file)
        # If best.yaml was copied without its workload, the workload is still at its absolute path.
        moved = os.path.exists(local) or not os.path.exists(there.rpartition(":")[0])
        request["workload"] = {**workload, "spec": f"{local}:{name}" if moved else there}
    used = (request.get("devices") or {}).get("used")
    alternatives = [*(contents.get("alternatives") or ()), contents.get("default") or {}]
    return PlanFile(
        trial=_trial(winner, used, path),
        document={"asked": request, "environment": contents.get("environment") or {}},
        others=tuple(
            plan["configuration"]
            for plan in alternatives
            if plan.get("configuration") and plan.get("devices", used) == used and request.get("simulated")
        ),
    )


def _trial(winner: Mapping[str, Any], devices: int | None, path: Path) -> Trial:
    """Returns the trial of an entry with either a measurement or a prediction."""
    predicted = winner.get("prediction") or {}
    throughput, memory = predicted.get("throughput"), predicted.get("memory_mib")
    reached = winner.get("throughput")  # in best.yaml it includes re-measurements
    try:
        if winner.get("measurement") is not None:
            measured = Measurement.from_dict(winner["measurement"])
            measured = measured if reached is None else replace(measured, throughput=reached)
        else:
            measured = Measurement(
                status=Status.OK,
                throughput=throughput if reached is None else reached,
                unit=predicted.get("unit") or winner.get("unit") or "",
                peak_memory_mib=memory,
                devices=devices,
            )
    except UsageError as error:
        raise StudyError(f"'{path}' is damaged: {error}") from error
    return Trial(
        number=winner.get("trial") or 0,
        config=dict(winner["configuration"]),
        sampler=winner.get("sampler") or PLANNED,
        predicted_throughput=throughput,
        predicted_memory_mib=memory,
        measurement=measured,
    )


def read(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    """Returns the contents of a folder's best.yaml; None without one. Damaged parts are left out and listed in
    `problems`.
    """
    contents = schema.read_document(folder, BEST, problems)
    if contents is None:
        return None
    contents, faults = schema.clean(contents, schema.BEST, BEST)
    problems += faults
    return contents


def covers(contents: Mapping[str, Any], trials: Sequence[Trial]) -> bool:
    """True if a best.yaml is about as many finished trials. It is written when the search ends."""
    return sum(filter(None, (contents.get("trials") or {}).values())) == len(trials)
