"""Reads a file or a command of another trainer as a configuration."""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_json, parse_yaml, path_of, read_named
from ..knobs.strategy import DEGREES, STANDARD, Strategy
from ..knobs.text import config_text
from ..space import Config
from .framework import Framework, Settings, SettingsReader, flattened, nested, plain, same_setting
from .registry import FRAMEWORKS, find_framework

SUFFIXES = (".toml", ".yaml", ".yml", ".json", ".sh", ".bash")
"""File endings that are recognised."""
COMMAND = "the command"
"""Name of a command in messages, as the path is that of a file."""


@dataclass(frozen=True, kw_only=True)
class SettingsSource:
    """The settings of one framework in one file or command."""

    framework: str
    where: str
    """The file's path, or `the command`."""
    form: str
    """`toml`, `yaml`, `json`, `shell`, or `options` and `assignments` of a command."""
    settings: Mapping[str, Any]
    stated: frozenset[str]
    """Knobs with explicit values."""


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
    notes: tuple[str, ...] = ()
    """Settings that have no knob, have no effect, or contradict each other."""
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
        return (
            {**_conventions(self.sources, config), **self.explicit_conventions}
            if self.sources
            else dict(self.conventions)
        )

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

    def changes(self, config: Mapping[str, Any]) -> tuple[Change, ...] | None:
        """Returns the lines to change for another configuration on the same devices, in the order of the files.

        Returns:
            None if the frameworks cannot express it, or if the changed lines would be read as something else.
        """
        edit = self.changed(config)
        return None if edit is None else edit[0]

    def changed(self, config: Mapping[str, Any]) -> "tuple[tuple[Change, ...], TrainerConfig] | None":
        """The lines of `changes`, and the training as it is read with them."""
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
        owners = {knob: self._owner(knob) for knob in knobs - {"dp"} - fixed.keys()}
        # A setting that the new value does not need is removed only if it would have an effect.
        for removing in (False, True):
            lines_to_change: list[Change] = []
            changed: list[SettingsSource] = []
            for number, source in enumerate(self.sources):
                try:
                    edited, lines = _edited(
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

    def _owner(self, knob: str) -> int | None:
        """Index of the last source that sets a knob, or of the first that could."""
        can = [
            number
            for number, source in enumerate(self.sources)
            if knob in find_framework(source.framework).knobs or knob in source.stated
        ]
        sets = [number for number in can if knob in self.sources[number].stated]
        return sets[-1] if sets else can[0] if can else None


def _edited(
    source: SettingsSource, old: Strategy, new: Strategy, knobs: set[str], removing: bool
) -> tuple[SettingsSource, list[Change]]:
    """Returns a source with the settings for these knobs of another strategy, and the changed lines.

    Raises:
        LookupError: the framework cannot express a value.
    """
    framework = find_framework(source.framework)
    reader = SettingsReader(source.settings, source.where, by_last=framework.by_last)
    mine = knobs & set(framework.knobs)
    present = framework.settings(old, reader, mine)
    wanted = framework.settings(new, reader, mine)
    keys = [key for key in {**present, **wanted} if present.get(key) != wanted.get(key) and (removing or key in wanted)]
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
        _change(source, reader, key, wanted.get(key)) for key in changed
    ]


def _change(source: SettingsSource, reader: SettingsReader, key: str, new: Any) -> Change:
    """Returns the changed line of a setting."""
    name = reader.name(key)
    old = reader.get(key)
    framework = find_framework(source.framework)
    if source.form in ("options", "assignments", "shell"):
        name = name.lstrip("-")
        value = str(new).lower() if isinstance(new, bool) else new
        flag = source.framework == "megatron" and isinstance(new, bool)
        option = find_framework(source.framework).option if source.form != "assignments" else "{key}={value}"
        line = f"--{name}" if flag else option.format(key=name, value=value)
        if framework.name == "torchtitan" and key == "activation_checkpoint.mode" and "config" in source.settings:
            line = f"activation_checkpoint:{new}"
        elif framework.name == "torchtitan" and isinstance(new, bool):
            section, dot, key_part = name.rpartition(".")
            line = f"--{section}{dot}{'' if new else 'no_'}{key_part}"
        if framework.name == "trainer" and "." in name and source.form != "shell":  # an argument with a JSON value
            argument, _, field = name.partition(".")
            line = f"--{argument} '{json.dumps({field: new})}'"
        if new is None or (flag and not new):
            line = f"without {name if source.form == 'assignments' else f'--{name}'}"
    elif new is None:
        line = f"without {name}"
    elif source.form == "yaml" and "." in name:
        import yaml

        line = yaml.safe_dump(nested({name: new}), default_flow_style=True, width=200).strip()[1:-1]
    elif source.form == "json":
        line = json.dumps(nested({name: new}))[1:-1]
    else:
        value = (
            str(new).lower()
            if isinstance(new, bool)
            else f'"{new}"'
            if isinstance(new, str) and source.form == "toml"
            else new
        )
        section, _, key_part = name.rpartition(".")
        header = f"[{section}] " if section else ""
        line = f"{header}{key_part} = {value}" if source.form == "toml" else f"{name}: {value}"
    return Change(where=source.where, key=name, old=old, new=new, text=line)


def read(source: str | os.PathLike[str] | Sequence[str], *, files: bool = True) -> TrainerConfig:
    """Reads a file (TOML, YAML, JSON, a shell script) or a command, as a text or its words. With `files` false, no file
    that the words of a command name is opened.

    >>> made = read("torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size 2 --bf16")
    >>> made.framework, made.devices, made.config["tp"]
    ('megatron', 8, 4)

    Raises:
        UsageError: a file cannot be read, or no framework is recognised; the message lists the known ones.
    """
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_file(source)):
        sources, launcher_facts = _read_file(path_of(source))
    else:
        arguments = _shell_words(source, COMMAND) if isinstance(source, str) else list(source)
        sources, launcher_facts = _read_command(arguments, COMMAND, files=files)
    if not sources:
        raise UsageError(_unrecognised(str(source) if isinstance(source, os.PathLike) else source))
    return combined(sources, launcher_facts)


def _is_file(source: str) -> bool:
    return source.strip().endswith(SUFFIXES) and (len(source.split()) == 1 or Path(source).is_file())


def _unrecognised(source: str | Sequence[str]) -> str:
    shown_text = source if isinstance(source, str) else shlex.join(source)
    signs = ", ".join(f"{find_framework(name).title} ({find_framework(name).signs[0]})" for name in FRAMEWORKS)
    return (
        f"no framework is recognised in '{shown_text[:100]}': none of its settings or programs is known to be one of "
        f"these: {signs}"
    )


def combined(sources: Sequence[SettingsSource], launcher_facts: Mapping[str, Any]) -> TrainerConfig:
    """Combines sources to one training; later sources take precedence."""
    knobs: dict[str, Any] = {}
    explicit_knobs: set[str] = set()
    facts: dict[str, Any] = {}
    conventions: dict[str, Any] = {}
    notes: list[str] = list(launcher_facts.get("notes", ()))
    combined_sources: list[SettingsSource] = []
    together: dict[str, dict[str, Any]] = {}
    alone: dict[str, SettingsReader | None] = {}
    for source in sources:
        # Options of a command replace settings of its file, and both have the same defaults.
        earlier = together.pop(source.framework, {})
        together[source.framework] = {
            **{name: value for name, value in earlier.items() if name not in source.settings},
            **source.settings,
        }
        reading = find_framework(source.framework).reading(source.settings, source.where)
        alone[source.framework] = None if source.framework in alone else reading
        combined_sources.append(replace(source, stated=frozenset(reading.knobs)))
    for name, settings in together.items():
        reading = alone[name] or find_framework(name).reading(settings, sources[-1].where)
        knobs |= reading.knobs
        explicit_knobs |= set(reading.knobs)
        facts |= reading.facts
        conventions |= reading.conventions
        notes += [note for note in reading.notes if note not in notes]
    main = find_framework(sources[-1].framework)
    for framework in (main, *(find_framework(source.framework) for source in sources)):
        for name, value in framework.defaults.items():
            knobs.setdefault(name, value)
    facts |= {name: value for name, value in launcher_facts.items() if value is not None and name != "notes"}
    if facts.pop("hybrid", False) and (host := facts.get("per_host")) and facts.get("devices", 0) > host:
        knobs["hsdp"] = facts["devices"] // host
    if "dp" in knobs and "devices" not in facts:
        facts["devices"] = prod(knobs.get(name, 1) for name in DEGREES)
    explicit, conventions = conventions, {**_conventions(sources, knobs), **conventions}
    order = knobs.get("pipeline_schedule")
    if order is not None and not STANDARD["pipeline_schedule"].can_be(order):
        knobs.pop("pipeline_schedule")
    return TrainerConfig(
        framework=main.name,
        config=Config(knobs),
        stated=frozenset(explicit_knobs),
        notes=tuple(notes),
        conventions=conventions,
        explicit_conventions=explicit,
        sources=tuple(combined_sources),
        **{member.name: facts[member.name] for member in fields(TrainerConfig) if member.name in facts},
    )


def _conventions(sources: Sequence[SettingsSource], knobs: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    names = [source.framework for source in sources]
    # DeepSpeed's engine has its own formats and reductions under any trainer.
    for name in ("deepspeed",) if "deepspeed" in names else names:
        merged |= find_framework(name).conventions(knobs)
    return merged


# -- files ----------------------------------------------------------------------------------------------------

SourcesAndFacts = tuple[list[SettingsSource], dict[str, Any]]
"""Sources, the least important first, and settings of a launcher."""


def _read_file(path: Path) -> SourcesAndFacts:
    if path.suffix in (".sh", ".bash"):
        sources, facts = _read_command(_shell_words(_text(path), str(path)), str(path), form="shell")
        return sources, facts
    settings = read_document(path)
    framework = _recognised(settings)
    if framework is None:
        raise UsageError(_unrecognised(str(path)))
    return _with_files(framework, settings, str(path), path.suffix.lstrip(".").replace("yml", "yaml"), path.parent)


def _text(path: Path) -> str:
    try:
        return read_named(path, at_most=LARGEST_DOCUMENT).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8") from error


def read_document(path: Path) -> dict[str, Any]:
    """Settings of a file.

    Raises:
        UsageError: it cannot be read, or is not a mapping.
    """
    content = _text(path)
    try:
        if path.suffix == ".toml":
            document: Any = tomllib.loads(content)
        else:
            document = parse_json(content.encode()) if path.suffix == ".json" else parse_yaml(content)
    except (Malformed, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} must contain a mapping of settings, but contains a {type(document).__name__}")
    return flattened(document)


def _recognised(settings: Settings) -> Framework | None:
    """Framework with the most signs among settings; the first of equals."""
    counted = [(find_framework(name).recognised(settings), find_framework(name)) for name in FRAMEWORKS]
    most, framework = max(counted, key=lambda candidate: candidate[0])
    return framework if most else None


_FILES = {
    "deepspeed": "deepspeed",
    "deepspeed_config": "deepspeed",
    "deepspeed_config.deepspeed_config_file": "deepspeed",
    "deepspeed_config_file": "deepspeed",
    "fsdp_config": "trainer",
    "config_file": "accelerate",
    "job.config_file": "torchtitan",
}
"""Settings that name a further file, and the framework of that file."""
_STAGE = re.compile(r"(?:zero|z|stage)[-_]?([0-3])", re.IGNORECASE)


def _with_files(
    framework: Framework, settings: dict[str, Any], where: str, form: str, folder: Path | None
) -> SourcesAndFacts:
    """A source, preceded by those of the files that it names, relative to a folder; None: they are not opened."""
    sources: list[SettingsSource] = []
    facts: dict[str, Any] = {"notes": []}
    own_settings = dict(settings)
    for name, value in settings.items():
        if plain(name) == "fsdp_config" and isinstance(value, str) and value.lstrip().startswith("{"):
            own_settings |= {f"fsdp_config.{key}": field_value for key, field_value in _inline(name, value).items()}
        kind = _FILES.get(plain(name))
        if kind is None or folder is None or not isinstance(value, str) or not value.endswith(SUFFIXES[:4]):
            continue
        file = next((candidate for candidate in (Path(value), folder / value) if candidate.is_file()), None)
        if file is None:
            stage = _STAGE.search(Path(value).stem)
            if kind != "deepspeed" or stage is None:
                raise UsageError(f"{where}: the file {value} of {name} is not there")
            facts["notes"].append(f"{name}: {value} is not there; by its name it is ZeRO stage {stage[1]}")
            offload = {"zero_optimization.offload_optimizer.device": "cpu"} if "offload" in value else {}
            file_settings = {"zero_optimization.stage": int(stage[1]), **offload}
        else:
            file_settings = read_document(file)
            if kind == "trainer":
                own_settings |= {f"fsdp_config.{key}": field_value for key, field_value in file_settings.items()}
                continue
        file_name = str(file) if file is not None else value
        file_form = "json" if file_name.endswith(".json") else Path(file_name).suffix.lstrip(".")
        sources.append(_source(kind, file_settings, file_name, file_form))
    commands = form not in ("toml", "yaml", "json")
    own_settings, facts["unset"] = _without_variables(framework, own_settings, commands=commands)
    sources.append(_source(framework.name, own_settings, where, form))
    return sources, facts


def _without_variables(
    framework: Framework, settings: Settings, *, commands: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings without unset variables, and the sizes that are unknown without them, by redline's option. An option of a
    command that has only such a value is a flag."""
    options = {plain(key): f"--fix {knob}=N" for knob, table in framework.knobs.items() for key in table.keys}
    options |= {plain(key): "--seq-len N" for key in framework.seq_len}
    options |= {plain(key): "--model MODEL" for key in framework.model}
    kept_settings: dict[str, Any] = {}
    unset: dict[str, str] = {}
    for name, value in settings.items():
        items = value if isinstance(value, list) else [value]
        literals = [item for item in items if not (isinstance(item, str) and "$" in item)]
        if len(literals) == len(items):
            kept_settings[name] = value
            continue
        total = plain(name).endswith(("global_batch_size", "train_batch_size")) and "per_device" not in plain(name)
        option = options.get(plain(name), "--global-batch N" if total else None)
        if option is not None and items[0] not in literals:
            unset[option] = f"{name.lstrip('-')} = {items[0]}"
        elif commands:
            kept_settings[name] = True if not literals else literals[0] if len(literals) == 1 else literals
        else:
            kept_settings[name] = value
    return kept_settings, unset


def _merge_facts(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the facts of two launchers; those of the inner one take precedence."""
    facts = {**outer, **inner, "notes": [*outer.get("notes", ()), *inner.get("notes", ())]}
    return {**facts, "unset": {**outer.get("unset", {}), **inner.get("unset", {})}}


def _inline(name: str, text: str) -> dict[str, Any]:
    """Settings of an argument that is a JSON object.

    Raises:
        UsageError: it is not one.
    """
    try:
        document = parse_json(text.encode())
    except Malformed as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from error
    return flattened(document) if isinstance(document, dict) else {}


def _source(framework: str, settings: Mapping[str, Any], where: str, form: str) -> SettingsSource:
    return SettingsSource(
        framework=framework, where=where, form=form.replace("yml", "yaml"), settings=settings, stated=frozenset()
    )


# -- commands -------------------------------------------------------------------------------------------------

_PROGRAMS = (
    "accelerate",
    "deepspeed",
    "torchrun",
    "srun",
    "mpirun",
    "litgpt",
    "axolotl",
    "llamafactory-cli",
    "python",
    "python3",
)
_FLAGS = frozenset(
    [
        "standalone",
        "no_python",
        "module",
        "multi_gpu",
        "use_fsdp",
        "use_deepspeed",
        "cpu",
        "use_cpu",
        "no_local_rank",
        "exclusive",
        "debug",
        "quiet",
        "same_network",
    ]
)
"""Options of launchers without a value."""
_TRL = ("sft.py", "dpo.py", "kto.py", "grpo.py", "reward.py")
"""Scripts that `trl` starts by its subcommands."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ASSIGNED = re.compile(r"\+{0,2}([A-Za-z_~][\w.~/@]*)=(.*)", re.DOTALL)


def options_of(words: Sequence[str], flags: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Settings of a command's words: `--name value`, `--name=value`, `--name` and `name=value`.

    Several values become a list; no value becomes True.
    """
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("-") and len(word) > 1 and not _is_negative(word):
            name, equals, value = word.partition("=")
            if equals:
                yield name.lstrip("-"), value
                continue
            values = []
            while plain(name) not in flags and position < len(words) and not _begins(words[position]):
                values.append(words[position])
                position += 1
            yield name.lstrip("-"), True if not values else values[0] if len(values) == 1 else values
        elif match := _ASSIGNED.fullmatch(word):
            yield match[1], match[2]


def _is_negative(word: str) -> bool:
    return re.fullmatch(r"-[\d.]+(e-?\d+)?", word) is not None


def _begins(word: str) -> bool:
    return (word.startswith("-") and not _is_negative(word)) or (
        _ASSIGNED.fullmatch(word) is not None or word.startswith("activation_checkpoint:")
    )


def _read_command(words: list[str], where: str, form: str = "", *, files: bool = True) -> SourcesAndFacts:
    """Sources of a command and of the files that it names, and the devices that its launcher starts."""
    environment: dict[str, str] = {}
    while (
        words
        and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)
        and not any(brace in words[0] for brace in ("{",))
    ):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    script = _script_at(words)
    launcher, command = words[:script], words[script:]
    launched = _options(launcher)
    facts = _processes(launched, launcher, environment)
    sources: list[SettingsSource] = []
    if any(Path(word).name == "accelerate" for word in launcher):
        launcher_sources, further = _with_files(
            find_framework("accelerate"), _without(launched), where, form or "options", Path() if files else None
        )
        sources += [source for source in launcher_sources if len(source.settings)]
        facts = _merge_facts(further, facts)
    settings = _options(command)
    if "CONFIG_FILE" in environment:
        settings.setdefault("job.config_file", environment["CONFIG_FILE"])
    config_files = [
        word
        for word in command[1:]
        if word.endswith((".yaml", ".yml", ".toml", ".json")) and not word.startswith("-") and "=" not in word
    ]
    # The first of an option's values is its own; if that is a file, so are the others.
    taken = {
        text_value
        for value in settings.values()
        for text_value in (value if isinstance(value, list) and value[0] in config_files else [value])
        if isinstance(text_value, str)
    }
    config_files = [word for word in config_files if word not in taken]
    framework = _framework_of_command(command, settings)
    for key in [key_name for key_name in settings if plain(key_name) in ("config", "config_file")]:
        config_file = settings[key]
        if isinstance(config_file, str) and config_file.endswith(SUFFIXES[:4]):
            config_files.append(config_file)
            settings.pop(key)
    for file in config_files if files else ():
        file_sources, further = _read_file(Path(file))
        facts = _merge_facts(further, facts)
        sources += file_sources
        framework = framework or find_framework(file_sources[-1].framework)
    for word in command[1:]:
        if word.startswith("activation_checkpoint:"):
            settings[word] = True
    if framework is None:
        framework = _recognised(settings)
    only_names = framework is None and any(_FILES.get(plain(name)) == "deepspeed" for name in settings)
    if only_names:  # a script of the user's own that gets DeepSpeed's file
        framework = find_framework("deepspeed")
    if framework is not None:
        program = Path(command[0]).name if command else ""
        if program in ("litgpt", "trl") and len(command) > 1:
            settings["subcommand"] = command[1]
        if program in _TRL:
            settings["subcommand"] = program.removesuffix(".py")
        if program == "litgpt" and len(command) > 2 and not command[2].startswith("-"):
            settings.setdefault("model_name", command[2])
        assigned = "assignments" if framework.option.startswith("{key}=") else "options"
        command_sources, further = _with_files(framework, settings, where, form or assigned, Path() if files else None)
        sources += command_sources[:-1] if only_names else command_sources
        facts = _merge_facts(further, facts)
    # An option without a value hides the setting of a file.
    empty = {plain(name) for name, value in (*launched.items(), *settings.items()) if value == ""}
    sources = [
        replace(
            source, settings={name: v for name, v in source.settings.items() if v == "" or plain(name) not in empty}
        )
        for source in sources
    ]
    return sources, facts


def _options(words: Sequence[str]) -> dict[str, Any]:
    return dict(options_of(words, _FLAGS))


def _without(launched: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in launched.items() if plain(name) not in ("machine_rank", "main_process_port")}


def _script_at(words: Sequence[str]) -> int:
    """Start of the training's own words: its script, its module, or a program that starts ranks itself."""
    for index, word in enumerate(words):
        name = Path(word).name
        if name in ("litgpt", "axolotl", "llamafactory-cli", "trl"):
            return index
        if word == "-m" and index + 1 < len(words) and words[index + 1] not in _MODULES:
            return index + 1
        if name.endswith((".py", ".sh")) and not word.startswith("-"):
            return index
    return len(words) if any(Path(word).name in _PROGRAMS for word in words[:1]) else 0


def _framework_of_command(command: Sequence[str], settings: Settings) -> Framework | None:
    """Framework of a script or program by its name, unless its options contradict it."""
    if not command:
        return None
    name, line = Path(command[0]).name, " ".join(command[:3])
    by_program: dict[str, int] = {}
    for candidate in FRAMEWORKS:
        matched = [
            p
            for p in find_framework(candidate).programs
            if any(fnmatchcase(spelling, p) for spelling in (command[0], name, line))
        ]
        if matched:
            by_program[candidate] = max(map(len, matched))
    best = _recognised(settings)
    if not by_program:
        return best
    signs = {candidate: find_framework(candidate).recognised(settings) for candidate in by_program}
    # The one with the most signs, then the one with the most specific program name.
    chosen = find_framework(max(by_program, key=lambda candidate: (signs[candidate], by_program[candidate])))
    clearly = best is not None and best.name not in by_program and best.recognised(settings) > signs[chosen.name] + 1
    return best if clearly else chosen


def _processes(launched: Settings, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Number of devices that a launcher starts ranks on."""
    reader = SettingsReader(launched, COMMAND)
    per_host = reader.whole("nproc_per_node", "num_gpus", "ntasks_per_node", "gpus_per_node")
    hosts_text = str(reader.get("nnodes", "num_nodes", "nodes", "N") or environment.get("NNODES", 1)).rpartition(":")[2]
    hosts = int(hosts_text) if hosts_text.isdigit() else 1
    for variable in ("NGPU", "NPROC_PER_NODE"):
        if per_host is None and environment.get(variable, "").isdigit():
            per_host = int(environment[variable])
    if per_host is None and (visible := environment.get("CUDA_VISIBLE_DEVICES")) and words[:1] != ["accelerate"]:
        per_host = len(visible.split(","))
    if (include := reader.get("include")) is not None and ":" in str(include):
        slots = [len(host_slots.partition(":")[2].split(",")) for host_slots in str(include).split("@")]
        return {"devices": sum(slots), "per_host": slots[0]}
    if per_host is None:
        return {}
    if "$" in hosts_text:
        return {"per_host": per_host, "unset": {"--devices N": f"nnodes = {hosts_text}"}}
    return {"devices": per_host * hosts, "per_host": per_host}


# -- shells ---------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"(?:^|\|\|)[ \t]*([A-Za-z_]\w*)\+?=\((?!\()(.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
_SCALAR = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|\S*)[ \t]*$", re.MULTILINE)
_VARIABLE = re.compile(
    r"(?P<quote>\")?\$\{(?P<name>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\}(?(quote)\")|\$(?P<bare>[A-Za-z_]\w*)"
)


def _shell_words(script: str, where: str) -> list[str]:
    """Words of the command in a text, or at the end of a script, with its variables and arrays filled in.

    Raises:
        UsageError: it cannot be split into words.
    """
    if "\n" not in script.strip():
        return _split(script, where)
    script = re.sub(r"(?m)^[ \t]*#.*$|(?<=\s)#[^\"'\n]*$", "", script.replace("\\\n", " "))
    values: dict[str, str] = {}
    for match in _ARRAY.finditer(script):
        values[match[1]] = f"{values.get(match[1], '')} {' '.join(match[2].split())}"
    script = _ARRAY.sub("", script)
    for name, value in _SCALAR.findall(script):
        self_default = re.compile(rf"\$\{{{name}:?-([^}}]*)\}}")  # NAME=${NAME:-default}
        values.setdefault(name, self_default.sub(lambda match: match[1].strip("\"'"), value.strip("\"'")))
    script = _SCALAR.sub("", script)

    def valued(match: re.Match[str]) -> str:
        """A variable's value or default; an unset one is kept."""
        name, default = match["name"] or match["bare"], match["default"]
        return values.get(name, match[0] if default is None else default.strip("\"'"))

    def filled(line: str) -> str:
        for _ in range(8):  # values contain variables; a variable that contains itself would never end
            changed = _VARIABLE.sub(valued, line)
            if changed == line:
                break
            line = changed
        return line

    lines = [filled(line) for line in re.split(r"[\n;]|&&", script) if line.strip()]
    commands = [line for line in lines if any(program in line for program in (*_PROGRAMS, ".py", "torchtitan.train"))]
    chosen = max(commands, key=len, default="")
    if not chosen:  # a file with only flags
        chosen = " ".join(filled(flags) for flags in values.values() if flags.strip().startswith("-"))
    return _split(chosen.replace("exec ", ""), where)


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{where} cannot be split into words: {str(error).lower()}") from None
