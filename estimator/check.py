"""Predictions for a user's own configuration: fit, speed, bottleneck, and faster configurations."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import UsageError, WorkloadError, unknown
from ..frameworks.framework import SettingsReader
from ..frameworks.registry import find_framework
from ..frameworks.trainer_config import TrainerConfig
from ..knobs.rules import RULES, RuleContext, refusal
from ..knobs.strategy import STANDARD, Strategy, checked
from ..knobs.text import config_text, value_text
from ..models.presets import ServerModel, preset_of
from ..models.request import ModelRequest
from ..models.resolve import workload as resolve_workload
from .decisive import Fact, deciding_facts, without
from .document import finite, numbers
from .estimate import Estimate
from .estimator import Estimator
from .facts.derived import PartlyTrained
from .facts.model_facts import FactsSource
from .facts.traced import TracedFacts
from .hardware import Hardware, find_hardware
from .predictor import Faster, Predictor, faster_configurations
from .resolved_cache import CachedFacts, ResolvedModel, key_of_model, load, resolved_model, store
from .setup import TrainingSetup
from .time import BINDS, TIME_TERMS
from .trainers import Trainer, assumed, built, find_trainer, trainer_of

_OPTIONS = {
    "devices": "--devices N",
    "model": "--model MODEL",
    "seq_len": "--seq-len N",
    "global_batch": "--global-batch N",
}
"""Options that give facts beside the file."""
SPARE = 0.95
"""Chance to fit from which memory counts as spare."""
_LINKS = {
    "tensor parallel": "tp",
    "sequence exchange": "cp",
    "expert exchange": "ep",
    "data parallel": "dp",
    "parameter gathers": "dp",
    "pipeline transfers": "pp",
    "stalls": "pp",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Predictions for a training that a file or a command describes."""

    trainer: TrainerConfig
    model: str
    sample: str
    """A sample in words, such as `sequences of 4,096 tokens`; empty if unknown."""
    parameters: int
    hardware: Hardware
    estimate: Estimate
    fullest: str
    """The rank with the most memory, in words."""
    shares: Mapping[str, float]
    """Shares of the step by cause; they sum to 1."""
    faster: tuple[Faster, ...]
    framework: str
    """The trainer whose facts are assumed, a name in `redline.estimator.trainers`."""
    assumed: tuple[str, ...]
    """Assumptions about the trainer's memory, in words."""
    findings: tuple[str, ...]
    """Settings that have no effect, contradict each other, or waste memory or time."""
    facts: tuple[Fact, ...] = ()
    """What decides the prediction, each with its source."""
    without: tuple[str, ...] = ()
    """Settings that do not enter the prediction and may change memory or speed: the chance to fit is then unknown."""

    @property
    def fits(self) -> bool:
        """True if the predicted peak is within the device's memory."""
        return self.estimate.fits is not False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        estimate = self.estimate
        return {
            "framework": self.trainer.framework,
            "files": [source.where for source in self.trainer.sources],
            "model": self.model,
            "parameters": self.parameters,
            "hardware": self.hardware.name,
            "devices": self.trainer.devices,
            "seq_len": self.trainer.seq_len,
            "global_batch": self.trainer.global_batch,
            "config": self.trainer.config.to_dict(),
            "facts": [asdict(fact) for fact in self.facts],
            "not_read": {name: str(value) for name, value in self.trainer.unread.items()},
            "without": list(self.without),
            "fits": self.fits,
            **numbers(estimate),
            **({"probability_fits": None} if self.without else {}),
            "memory_limit_mib": finite(estimate.memory_limit_mib),
            "margin_mib": finite(estimate.memory_limit_mib - estimate.peak_memory_mib),
            "fullest_rank": self.fullest,
            "shares": dict(self.shares),
            "faster": [
                {
                    "config": faster.config.to_dict(),
                    "gain": finite(faster.gain),
                    "changes": [asdict(change) for change in faster.changes],
                    **numbers(faster.estimate),
                }
                for faster in self.faster
            ],
            "assumed_of": self.framework,
            "assumed": list(self.assumed),
            "findings": list(self.findings),
        }


def check(
    trainer: TrainerConfig,
    hardware: str | Path | Hardware,
    *,
    devices: int | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    knobs: Mapping[str, Any] | None = None,
    memory_limit_mib: float | None = None,
    framework: str | None = None,
    assume: Mapping[str, Any] | None = None,
) -> Check:
    """Predicts a training that `redline.frameworks.read` has read. Nothing is run.

    Args:
        trainer: the training, as read.
        hardware: a name in the table, a YAML file, or `Hardware`.
        devices: replaces the number that the file implies.
        model, seq_len, global_batch: replace the file's.
        knobs: values of knobs that the file leaves to code, such as `micro_batch`.
        memory_limit_mib: of a device; replaces its memory.
        framework: the trainer whose facts and kernels are assumed, a name in `redline.estimator.trainers`; None: the file's.
        assume: facts of the trainer's software, fields of `TrainingSetup`; they replace its own and the file's.

    Raises:
        UsageError: the model, the sequence length or the micro-batch is unknown, or sizes contradict each other.
    """
    machine = find_hardware(hardware)
    notes = [*filter(None, (machine.note, machine.unmeasured)), *trainer.notes]
    if (
        devices is not None
        and trainer.devices is not None
        and devices != trainer.devices
        and "dp" not in trainer.config
    ):
        notes.append(f"the file starts {trainer.devices} ranks; the estimate is for {devices} devices, as asked")
    given_facts = {"devices": devices, "model": model, "seq_len": seq_len, "global_batch": global_batch}
    given_facts = {name: value for name, value in given_facts.items() if value is not None}
    trainer = trainer.beside({name: _valid(name, value) for name, value in (knobs or {}).items()}, global_batch)
    asked_for = {f"--fix {name}=N" for name in trainer.given}
    asked_for |= {_OPTIONS[name] for name in given_facts}
    unset = {option: written for option, written in trainer.unset.items() if option not in asked_for}
    absent = {
        "--devices N": devices is None and trainer.devices is None,
        "--model MODEL": model is None and trainer.model is None and trainer.architecture is None,
        "--fix micro_batch=N": "micro_batch" not in trainer.config and trainer.global_batch is None,
        **dict.fromkeys(unset, True),
    }
    if any(absent.values()):
        options = " ".join(option for option, missing in absent.items() if missing)
        written = f" ({', '.join(unset.values())})" if unset else ""
        raise UsageError(f"{trainer.framework}: the file or command leaves facts out{written}: give {options}")
    trainer = trainer.on(devices)
    facts = trainer_of(trainer.framework) if framework is None else find_trainer(framework)
    facts = facts.assuming(assume or {})
    if (length := seq_len or trainer.seq_len) is not None:  # before a model is traced
        _refuse(trainer, RuleContext(devices=trainer.devices, global_batch=trainer.global_batch, seq_len=length))
    resolved, source = _model(trainer, model, seq_len, facts, machine)
    as_read = trainer
    trainer = replace(trainer, seq_len=resolved.seq_len, model=resolved.name)
    setup = TrainingSetup(
        devices=trainer.devices or 1,
        seq_len=resolved.seq_len,
        global_batch=None if trainer.global_batch is None else trainer.global_batch * trainer.sequences,
        memory_limit_mib=memory_limit_mib,
    )
    if trainer.trained_blocks is not None:
        source = PartlyTrained(source, abs(trainer.trained_blocks), last=trainer.trained_blocks > 0)
    estimator = Estimator(source, machine, setup, framework=facts.name)
    predictor = Predictor(trainer, facts, framework is not None, estimator, assume or {})
    context = RuleContext(devices=trainer.devices, global_batch=trainer.global_batch, seq_len=resolved.seq_len)
    _refuse(trainer, context)
    estimate = predictor(trainer.config)
    faster = faster_configurations(predictor, resolved.shape, estimate, machine, context)
    if trainer.lora and "target=all-linear" in trainer.lora and resolved.shape.get("experts"):
        notes.append(
            "lora: experts whose weights are fused, as in transformers, are not linear layers and have no adapters"
        )
    findings = [*notes, *_findings(predictor, estimate, machine, faster)]
    conventions = predictor.conventions(trainer.config)
    parameters = next(iter(predictor.estimator._facts.values())).parameters
    workload = resolved.trains.get("workload") or {}
    kind = workload.get("class") or resolved.shape.get("family")
    words = f"{resolved.name}{f' ({kind})' if kind else ''}, {parameters:,} parameters"
    sample = workload.get("sample")
    return Check(
        trainer=replace(trainer, conventions=conventions),
        model=resolved.name,
        sample=str(sample or (f"sequences of {resolved.seq_len:,} tokens" if resolved.seq_len else "")),
        parameters=parameters,
        hardware=machine,
        estimate=estimate,
        fullest=str(predictor.fullest(trainer.config)),
        shares=_shares(estimate, trainer.strategy(), machine),
        faster=faster,
        assumed=assumed(conventions),
        framework=facts.name,
        findings=tuple(dict.fromkeys(findings)),
        facts=deciding_facts(
            as_read,
            conventions,
            words,
            machine.name,
            given_facts,
            resolved.seq_len,
            assume or {},
        ),
        without=without(trainer),
    )


def _refuse(trainer: TrainerConfig, context: RuleContext) -> None:
    """Refuses degrees that do not fit together, in the file's words where they are its own.

    Raises:
        UsageError: they do not.
    """
    strategy = trainer.strategy()
    if strategy.ep > 1 and strategy.etp != 1 and strategy.replicas % strategy.ep:
        inner = [(name, getattr(strategy, name)) for name in ("tp", "pp")]
        split = "".join(f" / {name} {value}" for name, value in inner if value > 1)
        raise UsageError(
            f"{_setting(trainer, 'ep')} must divide the {strategy.replicas} data-parallel ranks "
            f"({context.devices} devices{split})"
        )
    if reason := refusal(strategy, context, [rule for rule in RULES if rule.general]):
        raise UsageError(reason)


def _valid(knob: str, value: Any) -> Any:
    """A given knob's value in its canonical spelling.

    Raises:
        UsageError: the knob is unknown, or cannot have this value.
    """
    if knob not in STANDARD:
        raise UsageError(unknown("knob", knob, STANDARD))
    return checked(knob, value)


def _model(
    trainer: TrainerConfig, model: str | None, seq_len: int | None, facts: Trainer, hardware: Hardware
) -> tuple[ResolvedModel, FactsSource]:
    """The model of a training and the source of its facts: shape numbers if the trainer builds a known family from its own
    modules, otherwise transformers' modules, from the cache if they are there."""
    name, length = model or trainer.model, seq_len or trainer.seq_len
    target: Any = name
    shape_name = None
    if model is None and trainer.architecture is not None:
        target = ServerModel.of(trainer.architecture)
        sizes = [trainer.architecture.get(field) for field in ("num_hidden_layers", "n_layer", "hidden_size", "n_embd")]
        shape_name = "{} of {} x {}".format(target.name, *(size for size in sizes if size is not None))
    elif name is not None and not Path(name).exists():
        target = preset_of(name) or name

    def trace() -> TracedFacts:
        try:
            workload = resolve_workload(target, seq_len=length, lora=trainer.lora)
        except WorkloadError as error:
            if model is not None:
                raise
            raise WorkloadError(f"the model of the file or command (--model names another): {error}") from error
        return TracedFacts(workload, hardware.operators, hardware.liger)

    key = key_of_model(ModelRequest(target, seq_len=length, lora=trainer.lora))
    resolved = None if key is None else load(key, ResolvedModel)
    if resolved is not None:
        source: FactsSource = CachedFacts(resolved.model_id, hardware.operators, hardware.liger, trace)
    else:
        source = traced = trace()
        resolved = resolved_model(traced.workload)
        if key is not None:
            store(key, resolved)
    named_model = resolved if shape_name is None else replace(resolved, name=shape_name)
    return named_model, (None if trainer.lora else built(resolved.shape, facts)) or source


def _shares(estimate: Estimate, strategy: Strategy, hardware: Hardware) -> dict[str, float]:
    """Shares of the step: compute, recomputation, memory bandwidth, each kind of links, bubble, launches and the rest."""
    inner = {
        "tp": strategy.tp,
        "cp": strategy.tp * strategy.cp * strategy.sp,
        "ep": strategy.ep * (1 if strategy.etp == 1 else strategy.tp),
        "dp": strategy.devices,
        "pp": strategy.devices,
    }
    shares: dict[str, float] = {}
    for term in TIME_TERMS:
        value = estimate.breakdown[f"time.{term}"]
        if term in _LINKS:
            across = inner[_LINKS[term]] > hardware.devices_per_node
            name = f"links between hosts ({term})" if across else f"links within a host ({term})"
        elif term == "offload":
            name = "links to host memory"
        else:
            name = "recomputation" if term == "recomputation" else BINDS[term]
        shares[name] = shares.get(name, 0.0) + value / estimate.step_ms
    return {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}


def _findings(predictor: Predictor, estimate: Estimate, hardware: Hardware, faster: Sequence[Faster]) -> list[str]:
    """Knobs that have no effect, or that cost time to save memory that is not needed and that no faster configuration changes."""
    trainer = predictor.trainer
    config, strategy = trainer.config, trainer.strategy()
    limit = estimate.memory_limit_mib / 1024
    findings: list[str] = []
    host = min(trainer.per_host or hardware.devices_per_node, hardware.devices_per_node)
    if strategy.tp > host:
        findings.append(
            f"{_setting(trainer, 'tp')} reaches across hosts of {host} devices: its collectives wait for the network"
        )
    if config.get("zero", 0) and strategy.replicas == 1 and "zero" in trainer.stated:
        findings.append(f"{_setting(trainer, 'zero')} has no effect: there is one replica")
    if config.get("sequence_parallel") and strategy.tp == 1:
        findings.append(f"{_setting(trainer, 'sequence_parallel')} has no effect without tensor parallelism")
    if strategy.pp > 1 and strategy.grad_accum < strategy.pp:
        findings.append(
            f"{strategy.grad_accum} micro-batches a step are fewer than the {strategy.pp} pipeline stages: most of them wait"
        )
    if estimate.fits:
        for knob, neutral, effect in (
            ("checkpoint_ratio", 0, "recomputes blocks"),
            ("offload", "none", "moves the update to the host"),
        ):
            is_readable = any(knob in find_framework(source.framework).knobs for source in trainer.sources)
            changed = any(configuration.config.get(knob, neutral) == neutral for configuration in faster)
            if config.get(knob, neutral) == neutral or changed or not (is_readable or knob in trainer.given):
                continue
            without = predictor({**config, knob: neutral})
            if without.probability_fits >= SPARE:
                peak, ratio = without.peak_memory_mib / 1024, without.step_ms / estimate.step_ms
                findings.append(
                    f"{_setting(trainer, knob)} {effect} with memory to spare: without it the peak is {peak:.1f} of {limit:.1f} "
                    f"GiB, and a step takes {ratio:.2f} times as long"
                )
    return findings


def _setting(trainer: TrainerConfig, knob: str) -> str:
    """A knob's value as the file writes it."""
    value = trainer.config[knob]
    default = config_text({knob: value})
    for source in trainer.sources:
        framework = find_framework(source.framework)
        written = framework.knobs.get(knob)
        if written is None or knob in trainer.given:
            continue
        reader = SettingsReader(source.settings, source.where, by_last=framework.by_last)
        names = written.keys or tuple(
            key for alternative in written.alternatives for settings in alternative.values() for key in settings
        )
        if (setting_value := reader.get(*names)) is not None:
            return f"{reader.name(*[name for name in names if reader.has(name)])}={setting_value}"
        with suppress(LookupError):
            (key, setting), *_ = written.settings(value, reader).items()
            default = f"{key}={value_text(setting)}, the default,"
    return default
