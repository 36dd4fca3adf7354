"""Chooses the configuration that a training continues in: the run's winner, the previous one, or a new plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.device import Device
from ..base.errors import NothingFound, StudyError, nearest
from ..base.reading import path_of
from ..models import Workload
from ..models.resolve import workload as resolve_workload
from ..results import View, summary
from ..results.best import is_plan, load
from ..results.names import holds_run, run_of
from ..space import Config
from .listener import TrainingStrategy
from .planning import adapted, with_samples_of
from .request import TrainRequest


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """The source of a training, and its known configuration."""

    spec: str
    """The model, as requested."""
    seq_len: int | None = None
    """Tokens of a sample; None for the model's default."""
    global_batch: int | None = None
    """Samples of a step; None for the model's default."""
    lora: str | None = None
    """Adapters to train; None for all weights."""
    config: Config | None = None
    devices: int | None = None
    """Number of devices of the configuration."""
    device_name: str | None = None
    """Name of these devices."""
    limit_mib: float | None = None
    """Memory limit of a device, MiB, if there was one."""
    name: str = ""
    predicted: float | None = None
    """Measured throughput of the configuration; None if there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Converts to the form of train.yaml."""
        return {**vars(self), "config": None if self.config is None else self.config.to_dict()}

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "TrainingSource":
        """Converts back from `to_dict`."""
        config = document.get("config")
        return TrainingSource(**{**document, "config": None if config is None else Config(config)})

    def workload(self, request: TrainRequest | None = None) -> Workload:
        """Returns the workload of the source, with the sizes and adapters of a request if there is one.

        Raises:
            WorkloadError: the model does not exist.
        """
        sizes = {
            name: getattr(request, name, None) or getattr(self, name) for name in ("seq_len", "global_batch", "lora")
        }
        return resolve_workload(self.spec, **sizes)


def read_source(source: str | Path, *, of_model: bool = True) -> TrainingSource:
    """Reads a run's folder, its best.yaml, a plan of `redline estimate`, or a model's name.

    Args:
        source: one of these.
        of_model: require the model; a configuration alone is enough for a caller that has the model.

    Raises:
        StudyError: a run is damaged, of a command, or does not exist in a folder of runs.
        NothingFound: a run has no winner.
    """
    path = run_of(path_of(source))
    if is_plan(path):
        plan_file = load(path)
        config, measured = Config(plan_file.trial.config), plan_file.trial.measured.throughput
        return _source(plan_file.trains, config, measured, str(path), of_model)
    if path.is_dir() and holds_run(path):
        view = View(path, Config)
        trials = view.trials()
        best = summary.best(trials)
        if best is None:
            raise NothingFound(f"'{path}' names no winner: {summary.why_nothing(trials)}")
        asked = (view.document or {}).get("asked", {})
        return _source(asked, best.config, best.throughput, str(path), of_model)
    if path.parent != Path() and ".py" not in path.name and not path.exists():
        if runs := [folder.name for folder in path.parent.glob("*") if holds_run(folder)]:
            raise StudyError(f"there is no run '{source}', and no model of that name{nearest(path.name, runs)}")
    return TrainingSource(spec=str(source), name=Path(str(source)).name.partition(".")[0] or str(source))


def _source(
    request_document: Mapping[str, Any], config: Config, throughput: float | None, source: str, of_model: bool
) -> TrainingSource:
    workload_entry = request_document.get("workload") or {}
    if "command" in workload_entry or (of_model and not workload_entry.get("spec")):
        kind = "a command" if "command" in workload_entry else "a callable, or of an unknown model"
        raise StudyError(f"'{source}' is of {kind}; redline trains models and workloads that have a name or a file")
    return TrainingSource(
        spec=str(workload_entry.get("spec") or ""),
        seq_len=request_document.get("seq_len"),
        global_batch=request_document.get("global_batch"),
        lora=workload_entry.get("lora"),
        config=config,
        devices=(request_document.get("devices") or {}).get("used"),
        device_name=(request_document.get("devices") or {}).get("name"),
        limit_mib=request_document.get("memory_limit_mib"),
        name=str(request_document.get("model") or ""),
        predicted=None if request_document.get("simulated") or request_document.get("emulated") else throughput,
    )


def winner(
    request: TrainRequest, source: TrainingSource, workload: Workload, device: Device
) -> TrainingStrategy | None:
    """Returns the run's winner, adapted to the requested knobs and global batch; None if there is none, or if other devices or
    another memory limit are requested.

    Raises:
        SpaceError: no configuration has the requested knobs and global batch.
    """
    if source.config is None or source.devices is None:
        return None
    if request.devices not in (None, source.devices) or request.limit_mib not in (None, source.limit_mib):
        return None
    trained = workload if request.global_batch else with_samples_of(workload, source.config)
    planned = adapted(
        trained, source.config, device, devices=source.devices, fixed=request.fix or {}, of="the run's winner"
    )
    return TrainingStrategy(config=planned.config, devices=source.devices, why=planned.why)


def without_batch(config: Config) -> Config:
    """Returns the configuration without the knobs that determine its samples per step."""
    return Config({name: value for name, value in config.items() if name not in ("micro_batch", "grad_accum")})
