"""The training that settings of other trainers describe, and the lines that change it."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from ..base.errors import UsageError
from ..knobs.strategy import DEGREES, STANDARD, Strategy
from ..knobs.text import config_text
from ..space import Config
from .framework import Framework, Settings, SettingsReader, is_off, nested, plain, same_setting, settings_of, text_of
from .registry import find_framework


@dataclass(frozen=True, kw_only=True)
class SettingsSource:
    """The settings of one framework in one file or command."""

    framework: str
    where: str
    """The file's path, or `the command`."""
    form: str
    """`toml`, `yaml`, `json`, or `options` and `assignments` of a command."""
    settings: Mapping[str, Any]
    stated: frozenset[str]
    """Knobs that follow from the settings and the framework's defaults."""
    section: str = ""
    """Prefix of the settings in the file, if they are a section of another framework's: `deepspeed.`."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A line of a file or command to change."""

    where: str
    key: str
    old: Any
    """None to add a line."""
    new: Any
    """None to remove the line."""
    text: str
    """The line as written."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Training that a file or a command of another trainer describes."""

    framework: str
    """Framework that decides; of several, that of the training script."""
    config: Config
    """Standard knobs, including the framework's defaults. `on` completes them for a number of devices."""
    stated: frozenset[str]
    """Knobs with explicit values, rather than the framework's defaults."""
    model: str | None = None
    """Name of the model, as written."""
    architecture: Mapping[str, Any] | None = None
    """The model as a Hugging Face config.json, if its sizes are given."""
    lora: str | None = None
    """Adapters, in the format of `--lora`."""
    seq_len: int | None = None
    global_batch: int | None = None
    devices: int | None = None
    """Number of devices implied by the launcher or the degrees."""
    per_host: int | None = None
    optimizer: str | None = None
    """The optimizer, as written."""
    trained_blocks: int | None = None
    """Blocks that are trained, the last ones; negative if backward passes through all others too. None: all weights are."""
    low_rank: int | None = None
    """Rank to which the optimizer projects gradients of the blocks' matrices (GaLore, APOLLO)."""
    one_unit: bool = False
    """True if FSDP wraps the model as one unit."""
    sequences: int = 1
    """Sequences of a sample: 2 for pairs, as in DPO."""
    reference_model: bool = False
    """True if a second model without gradients is in memory, as in DPO."""
    loaded_dtype: str | None = None
    """dtype in which weights are loaded, which those that are not trained keep; None: that of the precision."""
    adapter_dtype: str = "fp32"
    """dtype of the adapters' weights, whatever that of the loaded ones is."""
    wide_ends: bool = False
    """True if embeddings and head are trained in fp32, whatever the precision of other weights is."""
    copied_ends: Mapping[str, str] = field(default_factory=dict)
    """Parts of which a copy is trained beside adapters (peft's `modules_to_save`): `embedding`, `head`, and the copy's dtype."""
    defaults: frozenset[str] = frozenset()
    """Knobs and facts that are the framework's defaults."""
    unread: Mapping[str, Any] = field(default_factory=dict)
    """Settings that do not enter the estimate and are not known not to matter, by name."""
    notes: tuple[str, ...] = ()
    """Settings that have no knob, have no effect, contradict each other, or are refused by the framework."""
    conventions: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the estimator's `TrainingSetup` that differ from redline's own training."""
    explicit_conventions: Mapping[str, Any] = field(default_factory=dict)
    """The `conventions` that the files set; the others are the framework's defaults for the knobs."""
    sources: tuple[SettingsSource, ...] = ()
    unset: Mapping[str, str] = field(default_factory=dict)
    """Sizes whose value is an unset variable of a shell, as written, by the option of `redline check` that gives them."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that are given beside the files."""
    given_batch: int | None = None
    """Global batch that is given beside the files."""

    @property
    def unread_off(self) -> list[str]:
        """Settings of `unread` that are off, as they are by default."""
        on_by_default = {
            plain(name)
            for _, framework in self._frameworks()
            for name, value in framework.ignored.items()
            if not is_off(value)
        }
        return [name for name, value in self.unread.items() if is_off(value) and plain(name) not in on_by_default]

    def beside(self, knobs: Mapping[str, Any], global_batch: int | None) -> "TrainerConfig":
        """Returns this training with knobs and a global batch that are given beside the files, and replace theirs."""
        config, explicit = {**self.config, **knobs}, self.stated | set(knobs)
        changed = replace(self, given=knobs, given_batch=global_batch)
        if global_batch is not None:
            config.pop("grad_accum", None)
            explicit = explicit - {"grad_accum"}
            changed = replace(changed, global_batch=global_batch)
        return replace(changed, config=Config(config), stated=explicit)

    def conventions_with(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the conventions for another configuration of this training."""
        facts = {name: getattr(self, name) for name in ("lora", "loaded_dtype", "adapter_dtype")}
        return _conventions(self.sources, config, facts, self.explicit_conventions)

    def on(self, devices: int | None = None) -> "TrainerConfig":
        """Returns this training on a number of devices, with `dp`, `grad_accum` and `global_batch`.

        Raises:
            UsageError: the degrees do not divide the devices, or the replicas do not divide the batch.
        """
        count = devices or self.devices
        if count is None:
            raise UsageError(f"{self.framework}: the file does not give the number of devices: give --devices")
        config: dict[str, Any] = dict(self.config)
        degrees = {name: config[name] for name in DEGREES if config.get(name, 1) != 1 and name != "dp"}
        split = prod(degrees.values())
        product_text = " * ".join(f"{name} {value}" for name, value in degrees.items())
        if count % split:
            product_text += f" = {split}" if len(degrees) > 1 else ""
            raise UsageError(f"{product_text} must divide the devices, {count}")
        dp = count // split
        if config.get("dp", dp) != dp:
            written = " * ".join(filter(None, (product_text, f"dp {config['dp']}")))
            raise UsageError(
                f"the file is for {split * config['dp']} devices ({written}), but there are {count}: "
                f"its replicas must come to {dp}"
            )
        config["dp"] = dp
        if config.get("hsdp", 1) > 1 and dp * config.get("cp", 1) % config["hsdp"]:
            raise UsageError(f"{config['hsdp']} groups of replicas must divide the {dp} replicas")
        total = self._accumulate(config)
        return replace(self, config=Config(config), devices=count, global_batch=total)

    def _accumulate(self, config: dict[str, Any]) -> int | None:
        micro, dp, total = config.get("micro_batch"), config["dp"], self.global_batch
        if total is None:
            return None if micro is None else micro * dp * config.setdefault("grad_accum", 1)
        if micro is None:
            accum = config.get("grad_accum", 1)
            if total % (dp * accum):
                raise UsageError(f"the global batch, {total}, is not a multiple of dp {dp} * grad_accum {accum}")
            config["micro_batch"] = total // dp // accum
        elif total % (micro * dp):
            nearest = max(1, round(total / (micro * dp))) * micro * dp
            raise UsageError(
                f"the global batch, {total}, is not a multiple of micro_batch {micro} * dp {dp} = {micro * dp}; the "
                f"nearest multiple is {nearest}"
            )
        steps = total // (config["micro_batch"] * dp)
        if "grad_accum" in self.stated and config["grad_accum"] != steps:
            raise UsageError(
                f"the global batch is {total}, but micro_batch {config['micro_batch']} * grad_accum "
                f"{config['grad_accum']} * dp {dp} = {config['micro_batch'] * config['grad_accum'] * dp}"
            )
        config["grad_accum"] = steps
        return total

    def strategy(self) -> Strategy:
        """The knobs, with neutral values for missing ones."""
        return Strategy.of(self.config)

    def changed(self, config: Mapping[str, Any]) -> "tuple[tuple[Change, ...], TrainerConfig] | None":
        """The lines to change for another configuration on the same devices, in the order of the files, and the training as it is
        read with them; None if the frameworks cannot express it, or if the lines would be read as something else."""
        new, old = Strategy.of(config), self.strategy()
        knobs = {member.name for member in fields(Strategy) if getattr(new, member.name) != getattr(old, member.name)}
        fixed = {knob: getattr(new, knob) for knob in self.given}
        options = [
            Change(
                where="the options",
                key=knob,
                old=self.given[knob],
                new=fixed[knob],
                text=f"--fix {config_text({knob: fixed[knob]})}",
            )
            for knob in self.given
            if knob in knobs
        ]
        owners = {knob: self._owner(knob, new) for knob in knobs - {"dp"} - fixed.keys()}
        # A setting that the new value does not need is removed only if it would have an effect.
        for removing in (False, True):
            lines_to_change: list[Change] = []
            changed: list[SettingsSource] = []
            for number, source in enumerate(self.sources):
                try:
                    edited, lines = edited_source(
                        source, old, new, {k for k, owner in owners.items() if owner == number}, removing
                    )
                except LookupError:
                    return None
                changed.append(edited)
                lines_to_change += lines
            with suppress(UsageError):
                again = combined(changed, {"devices": self.devices, "per_host": self.per_host})
                again = again.beside(fixed, self.given_batch).on(self.devices)
                if again.strategy() == new:
                    return (*lines_to_change, *options), again
        return None

    def _owner(self, knob: str, strategy: Strategy) -> int | None:
        """Index of the last source that sets a knob, or of the first that could."""
        can = [
            number
            for number, (source, framework) in enumerate(self._frameworks())
            if (knob in framework.knobs or knob in source.stated)
            and not framework.cannot(
                knob, strategy, SettingsReader(source.settings, source.where, by_last=framework.by_last)
            )
        ]
        sets = [number for number in can if knob in self.sources[number].stated]
        return sets[-1] if sets else can[0] if can else None

    def _frameworks(self) -> list[tuple[SettingsSource, Framework]]:
        return [(source, find_framework(source.framework)) for source in self.sources]


def edited_source(
    source: SettingsSource, old: Strategy, new: Strategy, knobs: set[str], removing: bool
) -> tuple[SettingsSource, list[Change]]:
    """Returns a source with the settings for these knobs of another strategy, and the changed lines.

    Raises:
        LookupError: the framework cannot express a value.
    """
    framework = find_framework(source.framework)
    reader = SettingsReader(source.settings, source.where, by_last=framework.by_last)
    mine = knobs & set(framework.knobs)
    if any(framework.cannot(knob, new, reader) for knob in mine):
        raise LookupError
    present = framework.settings(old, reader, mine)
    wanted = framework.settings(new, reader, mine)
    removed = {key for key in wanted.keys() - present.keys() if wanted[key] is None and reader.has(key)}
    keys = [key for key in {**present, **wanted} if present.get(key) != wanted.get(key) and (removing or key in wanted)]
    keys += removed
    replaced = {plain(reader.name(key)) for key in keys}
    untouched = {name: value for name, value in source.settings.items() if plain(name) not in replaced}
    added = {reader.name(key): wanted[key] for key in keys if wanted.get(key) is not None}
    unchanged = {
        key
        for key in keys
        if wanted.get(key) is not None and reader.has(key) and same_setting(reader.get(key), wanted[key])
    }
    changed = [key for key in keys if key not in unchanged]
    return replace(source, settings=untouched | added), [
        changed_line(source, reader, key, wanted.get(key)) for key in changed
    ]


def changed_line(source: SettingsSource, reader: SettingsReader, key: str, new: Any) -> Change:
    """Returns the changed line of a setting."""
    name, old, form = source.section + reader.name(key), reader.get(key), source.form
    framework = find_framework(source.framework)
    if form == "assignments":
        line = f"{name}={text_of(new)}"
    elif form == "options":
        name = name.lstrip("-")
        line = framework.option(name, new, reader)
    elif form == "toml":
        section, _, key_part = name.rpartition(".")
        value = f'"{new}"' if isinstance(new, str) else json.dumps(new)
        line = f"[{section}] {key_part} = {value}" if section else f"{key_part} = {value}"
    elif form == "json":
        line = json.dumps(nested({name: new}))[1:-1]
    else:
        import yaml

        line = yaml.safe_dump(nested({name: new}), default_flow_style=True, width=1000).strip()[1:-1]
    if new is None:
        line = f"without --{name}" if form == "options" else f"without {name}"
    return Change(where=source.where, key=name, old=old, new=new, text=line)


def combined(sources: Sequence[SettingsSource], launcher_facts: Mapping[str, Any]) -> TrainerConfig:
    """Combines sources to one training; later sources take precedence."""
    knobs: dict[str, Any] = {}
    default_knobs: dict[str, Any] = {}
    defaults: set[str] = set()
    unread: dict[str, Any] = dict(launcher_facts.get("unread", {}))
    facts: dict[str, Any] = {}
    conventions: dict[str, Any] = {}
    notes: list[str] = list(launcher_facts.get("notes", ()))
    combined_sources: list[SettingsSource] = []
    together: dict[str, dict[str, Any]] = {}
    readings: dict[str, SettingsReader] = {}
    for source in sources:
        # Options of a command replace settings of its file, and both have the same defaults.
        framework, earlier = find_framework(source.framework), together.get(source.framework, {})
        earlier_settings = {
            name: value for name, value in earlier.items() if not _is_replaced(name, earlier, source.settings)
        }
        settings = together[framework.name] = {**earlier_settings, **source.settings}
        reading = framework.reading(source.settings, source.where)
        combined_sources.append(replace(source, stated=frozenset(reading.knobs)))
        readings.pop(framework.name, None)
        readings[framework.name] = framework.reading(settings, sources[-1].where) if earlier else reading
    for reading in readings.values():
        knobs |= {knob: value for knob, value in reading.knobs.items() if knob not in reading.defaults}
        default_knobs |= {knob: value for knob, value in reading.knobs.items() if knob in reading.defaults}
        defaults |= reading.defaults
        unread |= reading.facts.pop("unread")
        facts |= reading.facts
        conventions |= reading.conventions
        notes += [note for note in reading.notes if note not in notes]
    explicit_knobs = frozenset(knobs)
    knobs = default_knobs | knobs
    main = find_framework(sources[-1].framework)
    for framework in (main, *(find_framework(source.framework) for source in sources)):
        for name, value in framework.defaults.items():
            knobs.setdefault(name, value)
    beside = {
        name: value for name, value in launcher_facts.items() if value is not None and name not in ("notes", "unread")
    }
    facts |= beside | {"unset": {**beside.get("unset", {}), **facts.get("unset", {})}}
    if "deepspeed" in readings and settings_of(main.name).get("builds_on", main.name) == "trainer":
        notes += _refused_by_trainer(readings["deepspeed"], readings[main.name], main, facts.get("devices"))
    if facts.pop("hybrid", False) and (host := facts.get("per_host")) and facts.get("devices", 0) > host:
        knobs["hsdp"] = facts["devices"] // host
    if "dp" in knobs and "devices" not in facts:
        facts["devices"] = prod(knobs.get(name, 1) for name in DEGREES)
    explicit, conventions = conventions, _conventions(sources, knobs, facts, conventions)
    order = knobs.get("pipeline_schedule")
    if order is not None and not STANDARD["pipeline_schedule"].can_be(order):
        knobs.pop("pipeline_schedule")
    return TrainerConfig(
        framework=main.name,
        config=Config(knobs),
        stated=explicit_knobs,
        defaults=frozenset((defaults | knobs.keys()) - explicit_knobs - beside.keys()),
        unread=unread,
        notes=tuple(notes),
        conventions=conventions,
        explicit_conventions=explicit,
        sources=tuple(combined_sources),
        **{member.name: facts[member.name] for member in fields(TrainerConfig) if member.name in facts},
    )


def _refused_by_trainer(
    engine: SettingsReader, reader: SettingsReader, trainer: Framework, devices: int | None
) -> list[str]:
    """Notes on settings of DeepSpeed's file that transformers.Trainer refuses, because its own arguments have other values
    (transformers/integrations/deepspeed.py, `trainer_config_process`)."""
    own = {**trainer.defaults, **reader.knobs}
    expected = {
        "train_micro_batch_size_per_gpu": own["micro_batch"],
        "gradient_accumulation_steps": own["grad_accum"],
        "train_batch_size": None if devices is None else own["micro_batch"] * own["grad_accum"] * devices,
        **{f"{half}.enabled": own["precision"] == half for half in ("bf16", "fp16")},
    }
    return [
        f"{key} = {engine.get(key)} of {engine.where}: the Trainer refuses it, as its own arguments come to {value} (`auto`)"
        for key, value in expected.items()
        if value is not None and engine.has(key) and not same_setting(engine.get(key), value)
    ]


def _is_replaced(name: str, earlier: Settings, later: Settings) -> bool:
    """True if later settings have this one, a value in place of a section with it, or another class with its arguments."""
    sections = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    classes = [f"{section}.class_path" for section in sections if name.startswith(f"{section}.init_args.")]
    return not later.keys().isdisjoint({name, f"{name}.class_path", *sections}) or any(
        path in later and later[path] != earlier.get(path) for path in classes
    )


def _conventions(
    sources: Sequence[SettingsSource], knobs: Mapping[str, Any], facts: Mapping[str, Any], explicit: Mapping[str, Any]
) -> dict[str, Any]:
    """Conventions of the frameworks for these knobs, those of adapters, and those that the files set, which replace others."""
    merged: dict[str, Any] = {}
    names = {source.framework: None for source in sources}
    # DeepSpeed's engine has its own formats and reductions under any trainer, of adapters and frozen weights too.
    has_engine = "deepspeed" in names or explicit.get("deepspeed_update")
    for name in ("deepspeed",) if has_engine else names:
        merged |= find_framework(name).conventions(knobs)
    if facts.get("lora") and (loaded := facts.get("loaded_dtype")) and not has_engine:
        merged |= {"precision": "bf16_pure"} if loaded == "bf16" else {"frozen_bits": 32}
        merged["parameter_dtype"] = facts.get("adapter_dtype", "fp32")
    return {**merged, **explicit}
