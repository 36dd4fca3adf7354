"""Request of a training: the arguments of `redline.train` and of the command line, its source, and rules for resuming."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from ..base.device import Device
from ..base.errors import NothingFound, StudyError, UsageError, nearest, unknown
from ..base.option import Option, either, options_of
from ..base.reading import LARGEST_DOCUMENT, Malformed, absolute, parse_yaml, path_of, read_named
from ..models import Workload
from ..models.layouts.hugging_face import own_tokenizer
from ..models.lora import check_lora
from ..models.resolve import workload as resolve_workload
from ..results import View, summary
from ..results.best import is_plan, load
from ..results.names import holds_run, run_of
from ..runners.registry import RUNNERS
from ..space import Config
from ..tuner.budget import parse_memory
from ..tuner.trackers import TRACKERS
from .data import DataPlan
from .data.corpus import tokenizer_digest
from .data.order import BYTES
from .listener import TrainingStrategy
from .loop import Hyperparameters, LoopPlan
from .planning import adapted, with_samples_of


def with_tokenizer(request: "TrainRequest", say: Callable[[str], None]) -> "TrainRequest":
    """Returns the request with the tokenizer of the checkpoint that it starts from, if its data is text and it names
    no tokenizer.

    Args:
        request: the request.
        say: receives a message if another tokenizer is given than the weights were trained with, or if there is none.

    """
    if request.weights is None or not request.paths:
        return request
    source_tokenizer = own_tokenizer(request.weights)
    if request.tokenizer is None:
        if source_tokenizer is not None:
            return replace(request, tokenizer=str(source_tokenizer))
        say(
            f"'{request.weights}' has no tokenizer and none is given: text is read by bytes; --tokenizer names a folder of one"
        )
    elif source_tokenizer is not None and request.tokenizer == BYTES:
        say(
            f"text is read by bytes, as requested, but the weights were trained with the tokenizer in '{source_tokenizer}'"
        )
    elif source_tokenizer is not None and tokenizer_digest(request.tokenizer) != tokenizer_digest(
        str(source_tokenizer)
    ):
        say(
            f"the tokenizer in '{request.tokenizer}' has other files than the one in '{source_tokenizer}', with which the "
            "weights were trained; without --tokenizer the checkpoint's is used"
        )
    return request


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The start of a training: its source, devices and outputs.

    Args:
        source: a run's folder or its best.yaml, to train its winner; a model, for which a configuration is planned;
            or, to resume, the training's own folder.
        out: folder of the training; by default `train/NAME`.
        resume: continue the training in the folder.
        devices: number of devices; by default that of the configuration, or the previous one. Another number is
            replanned.
        workload: FILE:NAME of the source's workload, if its file has moved.
        memory_limit: memory of a device, MiB or as in `8GiB`; another limit than before is replanned.
        runner: runner of the ranks, a name in `redline.runners.registry.RUNNERS`.
        ray_address: a Ray cluster to join.
        weights: a checkpoint of another tool to start from, such as a Hugging Face model's folder.
        lora: train adapters only, such as `r=16`.
        seq_len: tokens of a sample, in place of the run's.
        global_batch: samples of an optimizer step, in place of the run's.
        fix: knobs of the configuration, in place of the winner's.
        log_to: trackers that the training is logged to, see `redline.tuner.trackers.TRACKERS`.
    """

    source: str | Path = field(kw_only=False)
    out: Annotated[
        str | Path | None, Option("Folder of the training.  [default: train/NAME, or NAME-2, ...]", metavar="DIR")
    ] = None
    resume: Annotated[bool, Option("Continue the training in the folder.")] = False
    devices: Annotated[
        int | None,
        Option("Devices; another number is replanned.  [default: as before]", type=int, least=1, metavar="N"),
    ] = None
    workload: Annotated[str | None, Option("The workload of SOURCE, if its file has moved.", metavar="FILE:NAME")] = (
        None
    )
    memory_limit: Annotated[
        str | float | None,
        Option("Memory of a device, such as 8GiB; another limit is replanned.", check=parse_memory, metavar="SIZE"),
    ] = None
    runner: Annotated[str, Option(f"Where ranks run: {either(RUNNERS)}.", choices=RUNNERS, metavar="NAME")] = "local"
    ray_address: Annotated[
        str | None, Option("A Ray cluster to join.  [default: RAY_ADDRESS, or a local one]", metavar="ADDRESS")
    ] = None
    weights: Annotated[
        str | Path | None,
        Option("A checkpoint to start from, such as a Hugging Face folder.", flag="from", metavar="DIR"),
    ] = None
    lora: Annotated[
        str | None,
        Option("Train adapters only: r, alpha, target=a+b, dropout.", check=check_lora, metavar="KNOB=V,..."),
    ] = None
    seq_len: Annotated[
        int | None, Option("Sequence length, tokens.  [default: the run's]", type=int, least=1, metavar="N")
    ] = None
    global_batch: Annotated[
        int | None, Option("Samples per optimizer step.  [default: the run's]", type=int, least=1, metavar="N")
    ] = None
    fix: Annotated[
        Mapping[str, Any] | None, Option("A knob, in place of the winner's.", metavar="KNOB=V", many=True)
    ] = None
    log_to: Annotated[
        str | Sequence[str] | None,
        Option(f"Log the training to {either(TRACKERS)}; repeatable.", metavar="NAME", many=True),
    ] = ()

    @cached_property
    def limit_mib(self) -> float | None:
        """Requested memory limit of a device, MiB. Raises UsageError if it is invalid."""
        return parse_memory(self.memory_limit)


@dataclass(frozen=True, kw_only=True)
class TrainRequest(LaunchRequest, LoopPlan, Hyperparameters, DataPlan):
    """Request of a training, in four sections. Paths become absolute, because it may be resumed from another folder.

    Raises:
        UsageError: a value is out of its range.
    """

    stated: tuple[str, ...] = ()
    """Fields that were given explicitly: they count even if they equal the default."""

    def __post_init__(self) -> None:
        for section in (LoopPlan, Hyperparameters, DataPlan):
            section.__post_init__(self)
        for name in ("tokenizer", "weights"):
            if (value := getattr(self, name)) is not None and (name, value) != ("tokenizer", BYTES):
                object.__setattr__(self, name, absolute(value))
        object.__setattr__(self, "paths", tuple(absolute(path) for path in self.paths))
        if self.ray_address is not None and self.runner != "ray":
            raise UsageError(f"ray_address={self.ray_address} has no effect on the runner '{self.runner}'")

    @staticmethod
    def again(source: str | Path, request_document: Mapping[str, Any], **starts: Any) -> "TrainRequest":
        """Restores a request from train.yaml.

        Raises:
            UsageError: it is of another version, with fields that this one does not have.
        """
        names = {request_field.name for request_field in fields(TrainRequest)}
        if foreign := sorted(request_document.keys() - names - WITHOUT_EFFECT):
            raise UsageError(
                f"the training was started by another version of redline, with {', '.join(foreign)}, which this one does not "
                "have: continue it with that version, whose `redline convert` writes a folder for --from of this one"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in request_document.items()
            if name in names
        }
        return TrainRequest(**{**values, "source": source, **starts})

    def section(self, kind: type) -> Any:
        """Returns one of its sections: `Hyperparameters`, `LoopPlan` or `DataPlan`."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def given(self) -> dict[str, Any]:
        """Returns the values that differ from the default or are `stated`, by name."""
        values = {}
        for request_field in fields(self):
            value = getattr(self, request_field.name)
            is_set = request_field.name in self.stated or value != request_field.default
            if request_field.name not in OF_A_START and value is not None and is_set:
                values[request_field.name] = as_listed(value)
        return values


def as_listed(value: Any) -> Any:
    """Converts a value to its form in train.yaml: a sequence to a list."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


OF_A_START = ("source", "out", "resume", "stated", "workload", "runner", "ray_address")
"""Fields that describe one start of the training rather than the training."""
WITHOUT_EFFECT = {"soak"}
"""Fields of earlier versions that did not change a training's results."""
MAY_CHANGE = (
    *OF_A_START,
    "devices",
    "memory_limit",
    "fix",
    "log_to",
    "steps",
    "lr_steps",
    *(field.name for field in fields(LoopPlan)),
)
"""Fields that may change when a training is resumed: they affect the length of the training, not its results."""
SECTIONS = (LaunchRequest, DataPlan, Hyperparameters, LoopPlan)
"""Sections of a request, in reading order."""


def read_settings(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file with values of `Hyperparameters`, `LoopPlan` and `DataPlan`, by the names of their fields.

    Raises:
        UsageError: the file cannot be read, or a name or the kind of a value is unknown.
    """
    settings_path = path_of(path)
    try:
        values = parse_yaml(read_named(settings_path, at_most=LARGEST_DOCUMENT), ours=True)
    except (OSError, Malformed) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the settings in {settings_path} cannot be read: {why}") from error
    sections = (DataPlan, Hyperparameters, LoopPlan)
    setting_options = {field.name: (field, option) for section in sections for field, option in options_of(section)}
    del setting_options["paths"]
    if not isinstance(values, dict):
        raise UsageError(f"the settings in {settings_path} must be a mapping, such as `warmup: 100`")
    settings = {}
    for name, value in values.items():
        if name not in setting_options:
            raise UsageError(f"the settings in {settings_path}: {unknown('setting', name, setting_options)}")
        field, option = setting_options[name]
        settings[name] = tuple(value) if isinstance(value, list) else value
        kind = (
            type(field.default) if isinstance(field.default, (bool, tuple)) else str if option.type is None else object
        )
        if value is None or not isinstance(settings[name], kind):
            raise UsageError(
                f"the settings in {settings_path}: {name} cannot be {value!r}; its default is {field.default!r}"
            )
    return settings


def taken_up(request: TrainRequest, request_document: Mapping[str, Any], step: int) -> tuple[TrainRequest, str | None]:
    """Returns the request to continue a training at a step, and a note for the user. Fixed knobs are added to the previous ones,
    and replace their values.

    Raises:
        UsageError: it contradicts the training's request; the message names the field.
    """
    previous, changes = TrainRequest.again(request.source, request_document), request.given()
    previous_values = previous.given()
    for name, value in changes.items():
        if name not in MAY_CHANGE and value != as_listed(getattr(previous, name)):
            raise UsageError(
                f"the training in '{request.out or request.source}' has {name}="
                f"{previous_values.get(name, 'the default')}, and cannot continue with {value!r}; start another one for that"
            )
    if previous.fix and "fix" in changes:
        changes["fix"] = {**previous.fix, **changes["fix"]}
    starts = {name: getattr(request, name) for name in OF_A_START if name != "source"}
    continued = TrainRequest.again(request.source, request_document, **{**changes, **starts})
    return with_schedule(continued, previous, step)


def with_schedule(request: TrainRequest, previous: TrainRequest, step: int) -> tuple[TrainRequest, str | None]:
    """Returns a request with another number of steps, whose learning rate continues by the previous schedule, and a
    note for the user; None if the schedule needs no note.

    The schedule is stretched to the new number of steps only if that does not change the learning rate at the current
    step, as in the stable part of `wsd`; otherwise the rate would jump.
    """
    old, new = previous.section(Hyperparameters), request.section(Hyperparameters)
    old_factor, horizon = old.lr_factor(step), old.lr_steps or old.steps
    if new.lr_factor(step) == old_factor:
        return request, None
    if request.lr_steps == previous.lr_steps:
        request = replace(request, lr_steps=horizon)
        continued = request.section(Hyperparameters)
        end = f" to {_rate(continued, horizon)}, where it stays" if request.steps > horizon else ""
        return request, (
            f"the learning rate continues by its schedule over {horizon} steps, from {_rate(old, step)}{end}; "
            f"lr_steps: {request.steps} in --settings lets it fall over all {request.steps}, from {_rate(new, step)}"
        )
    return request, (
        f"by lr_steps={request.lr_steps} the learning rate jumps from {_rate(old, step)} to {_rate(new, step)} at step {step}"
    )


def _rate(hyper: Hyperparameters, step: int) -> str:
    """Returns the learning rate of a step as text."""
    factor = hyper.lr_factor(step)
    return f"{factor * hyper.lr:.2e}" if hyper.lr is not None else f"{100 * factor:.0f} % of the highest"


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
