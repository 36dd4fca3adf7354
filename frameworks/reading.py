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
from .framework import Framework, Settings, Stated, flattened, nested, plain, same_setting
from .registry import FRAMEWORKS, find_framework

SUFFIXES = (".toml", ".yaml", ".yml", ".json", ".sh", ".bash")
"""File endings that are recognised."""
COMMAND = "the command"
"""Location of a command, for messages."""


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
        config, stated = {**self.config, **knobs}, self.stated | set(knobs)
        changed = replace(self, given=knobs, given_batch=global_batch)
        if global_batch is not None:
            config.pop("grad_accum", None)
            stated = stated - {"grad_accum"}
            changed = replace(changed, global_batch=global_batch)
        return replace(changed, config=Config(config), stated=stated)

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
        given = {name: config[name] for name in DEGREES if config.get(name, 1) != 1 and name != "dp"}
        split = prod(given.values())
        words = " * ".join(f"{name} {value}" for name, value in given.items())
        if count % split:
            words += f" = {split}" if len(given) > 1 else ""
            raise UsageError(f"{words} must divide the devices, {count}")
        dp = count // split
        if config.get("dp", dp) != dp:
            stated = " * ".join(filter(None, (words, f"dp {config['dp']}")))
            raise UsageError(
                f"the file is for {split * config['dp']} devices ({stated}), but there are {count}: "
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
        found = self.changed(config)
        return None if found is None else found[0]

    def changed(self, config: Mapping[str, Any]) -> "tuple[tuple[Change, ...], TrainerConfig] | None":
        """The lines of `changes`, and the training as it is read with them."""
        new, old = Strategy.of(config), self.strategy()
        knobs = {each.name for each in fields(Strategy) if getattr(new, each.name) != getattr(old, each.name)}
        given = {knob: getattr(new, knob) for knob in self.given}
        options = [
            Change(
                where="the options",
                key=knob,
                old=self.given[knob],
                new=given[knob],
                text=f"--fix {config_text({knob: given[knob]})}",
            )
            for knob in self.given
            if knob in knobs
        ]
        owners = {knob: self._owner(knob) for knob in knobs - {"dp"} - given.keys()}
        # A setting that the new value does not need is removed only if it would have an effect.
        for removing in (False, True):
            out: list[Change] = []
            changed: list[SettingsSource] = []
            for number, source in enumerate(self.sources):
                try:
                    edited, lines = _edited(source, old, new, {k for k, at in owners.items() if at == number}, removing)
                except LookupError:
                    return None
                changed.append(edited)
                out += lines
            with suppress(UsageError):
                again = combined(changed, {"devices": self.devices, "per_host": self.per_host})
                again = again.beside(given, self.given_batch).on(self.devices)
                if again.strategy() == new:
                    return (*out, *options), again
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
    stated = Stated(source.settings, source.where, by_last=framework.by_last)
    mine = knobs & set(framework.knobs)
    before = framework.settings(old, stated, mine)
    after = framework.settings(new, stated, mine)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and (removing or key in after)]
    replaced = {plain(stated.name(key)) for key in keys}
    kept = {name: value for name, value in source.settings.items() if plain(name) not in replaced}
    added = {stated.name(key): after[key] for key in keys if after.get(key) is not None}
    unchanged = {
        key
        for key in keys
        if after.get(key) is not None and stated.has(key) and same_setting(stated.get(key), after[key])
    }
    changed = [key for key in keys if key not in unchanged]
    return replace(source, settings=kept | added), [_change(source, stated, key, after.get(key)) for key in changed]


def _change(source: SettingsSource, stated: Stated, key: str, new: Any) -> Change:
    """Returns the changed line of a setting."""
    name = stated.name(key)
    old = stated.get(key)
    framework = find_framework(source.framework)
    if source.form in ("options", "assignments", "shell"):
        name = name.lstrip("-")
        value = str(new).lower() if isinstance(new, bool) else new
        flag = source.framework == "megatron" and isinstance(new, bool)
        option = find_framework(source.framework).option if source.form != "assignments" else "{key}={value}"
        text = f"--{name}" if flag else option.format(key=name, value=value)
        if framework.name == "torchtitan" and key == "activation_checkpoint.mode" and "config" in source.settings:
            text = f"activation_checkpoint:{new}"
        elif framework.name == "torchtitan" and isinstance(new, bool):
            section, dot, last = name.rpartition(".")
            text = f"--{section}{dot}{'' if new else 'no_'}{last}"
        if framework.name == "trainer" and "." in name and source.form != "shell":  # an argument with a JSON value
            argument, _, field = name.partition(".")
            text = f"--{argument} '{json.dumps({field: new})}'"
        if new is None or (flag and not new):
            text = f"without {name if source.form == 'assignments' else f'--{name}'}"
    elif new is None:
        text = f"without {name}"
    elif source.form == "yaml" and "." in name:
        import yaml

        text = yaml.safe_dump(nested({name: new}), default_flow_style=True, width=200).strip()[1:-1]
    elif source.form == "json":
        text = json.dumps(nested({name: new}))[1:-1]
    else:
        value = (
            str(new).lower()
            if isinstance(new, bool)
            else f'"{new}"'
            if isinstance(new, str) and source.form == "toml"
            else new
        )
        section, _, last = name.rpartition(".")
        header = f"[{section}] " if section else ""
        text = f"{header}{last} = {value}" if source.form == "toml" else f"{name}: {value}"
    return Change(where=source.where, key=name, old=old, new=new, text=text)


def read(given: str | os.PathLike[str] | Sequence[str], *, files: bool = True) -> TrainerConfig:
    """Reads a file (TOML, YAML, JSON, a shell script) or a command, as a text or its words. With `files` false, no file
    that the words of a command name is opened.

    >>> made = read("torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size 2 --bf16")
    >>> made.framework, made.devices, made.config["tp"]
    ('megatron', 8, 4)

    Raises:
        UsageError: a file cannot be read, or no framework is recognised; the message lists the known ones.
    """
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_file(given)):
        sources, beside = _of_file(path_of(given))
    else:
        words = _shell_words(given, COMMAND) if isinstance(given, str) else list(given)
        sources, beside = _of_words(words, COMMAND, files=files)
    if not sources:
        raise UsageError(_unrecognised(str(given) if isinstance(given, os.PathLike) else given))
    return combined(sources, beside)


def _is_file(text: str) -> bool:
    return text.strip().endswith(SUFFIXES) and (len(text.split()) == 1 or Path(text).is_file())


def _unrecognised(given: str | Sequence[str]) -> str:
    what = given if isinstance(given, str) else shlex.join(given)
    known = ", ".join(f"{find_framework(name).title} ({find_framework(name).signs[0]})" for name in FRAMEWORKS)
    return f"no framework is recognised in '{what[:100]}': none of its settings or programs is known to be one of these: {known}"


def combined(sources: Sequence[SettingsSource], beside: Mapping[str, Any]) -> TrainerConfig:
    """Combines sources to one training; later sources take precedence."""
    knobs: dict[str, Any] = {}
    stated: set[str] = set()
    facts: dict[str, Any] = {}
    conventions: dict[str, Any] = {}
    notes: list[str] = list(beside.get("notes", ()))
    combined_sources: list[SettingsSource] = []
    together: dict[str, dict[str, Any]] = {}
    alone: dict[str, Stated | None] = {}
    for source in sources:
        # Options of a command replace settings of its file, and both have the same defaults.
        earlier = together.pop(source.framework, {})
        together[source.framework] = {
            **{name: value for name, value in earlier.items() if name not in source.settings},
            **source.settings,
        }
        own = find_framework(source.framework).reading(source.settings, source.where)
        alone[source.framework] = None if source.framework in alone else own
        combined_sources.append(replace(source, stated=frozenset(own.knobs)))
    for name, settings in together.items():
        found = alone[name] or find_framework(name).reading(settings, sources[-1].where)
        knobs |= found.knobs
        stated |= set(found.knobs)
        facts |= found.facts
        conventions |= found.conventions
        notes += [each for each in found.notes if each not in notes]
    main = find_framework(sources[-1].framework)
    for framework in (main, *(find_framework(each.framework) for each in sources)):
        for name, value in framework.defaults.items():
            knobs.setdefault(name, value)
    facts |= {name: value for name, value in beside.items() if value is not None and name != "notes"}
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
        stated=frozenset(stated),
        notes=tuple(notes),
        conventions=conventions,
        explicit_conventions=explicit,
        sources=tuple(combined_sources),
        **{each.name: facts[each.name] for each in fields(TrainerConfig) if each.name in facts},
    )


def _conventions(sources: Sequence[SettingsSource], knobs: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    names = [source.framework for source in sources]
    # DeepSpeed's engine has its own formats and reductions under any trainer.
    for name in ("deepspeed",) if "deepspeed" in names else names:
        out |= find_framework(name).conventions(knobs)
    return out


# -- files ----------------------------------------------------------------------------------------------------

Found = tuple[list[SettingsSource], dict[str, Any]]
"""Sources, the least important first, and settings of a launcher."""


def _of_file(path: Path) -> Found:
    if path.suffix in (".sh", ".bash"):
        sources, facts = _of_words(_shell_words(_text(path), str(path)), str(path), form="shell")
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
    text = _text(path)
    try:
        if path.suffix == ".toml":
            document: Any = tomllib.loads(text)
        else:
            document = parse_json(text.encode()) if path.suffix == ".json" else parse_yaml(text)
    except (Malformed, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} must contain a mapping of settings, but contains a {type(document).__name__}")
    return flattened(document)


def _recognised(settings: Settings) -> Framework | None:
    """Framework with the most signs among settings; the first of equals."""
    found = [(find_framework(name).recognised(settings), find_framework(name)) for name in FRAMEWORKS]
    most, framework = max(found, key=lambda each: each[0])
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


def _with_files(framework: Framework, settings: dict[str, Any], where: str, form: str, folder: Path | None) -> Found:
    """A source, preceded by those of the files that it names, relative to a folder; None: they are not opened."""
    out: list[SettingsSource] = []
    facts: dict[str, Any] = {"notes": []}
    own = dict(settings)
    for name, value in settings.items():
        if plain(name) == "fsdp_config" and isinstance(value, str) and value.lstrip().startswith("{"):
            own |= {f"fsdp_config.{key}": each for key, each in _inline(name, value).items()}
        kind = _FILES.get(plain(name))
        if kind is None or folder is None or not isinstance(value, str) or not value.endswith(SUFFIXES[:4]):
            continue
        file = next((each for each in (Path(value), folder / value) if each.is_file()), None)
        if file is None:
            stage = _STAGE.search(Path(value).stem)
            if kind != "deepspeed" or stage is None:
                raise UsageError(f"{where}: the file {value} of {name} is not there")
            facts["notes"].append(f"{name}: {value} is not there; by its name it is ZeRO stage {stage[1]}")
            offload = {"zero_optimization.offload_optimizer.device": "cpu"} if "offload" in value else {}
            found = {"zero_optimization.stage": int(stage[1]), **offload}
        else:
            found = read_document(file)
            if kind == "trainer":
                own |= {f"fsdp_config.{key}": each for key, each in found.items()}
                continue
        shown = str(file) if file is not None else value
        out.append(_source(kind, found, shown, "json" if shown.endswith(".json") else Path(shown).suffix.lstrip(".")))
    own, facts["unset"] = _without_variables(framework, own, commands=form not in ("toml", "yaml", "json"))
    out.append(_source(framework.name, own, where, form))
    return out, facts


def _without_variables(
    framework: Framework, settings: Settings, *, commands: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings without unset variables, and the sizes that are unknown without them, by redline's option. An option of a
    command that has only such a value is a flag."""
    options = {plain(key): f"--fix {each.knob}=N" for each in framework.knobs.values() for key in each.keys}
    options |= {plain(key): "--seq-len N" for key in framework.seq_len}
    options |= {plain(key): "--model MODEL" for key in framework.model}
    out: dict[str, Any] = {}
    unset: dict[str, str] = {}
    for name, value in settings.items():
        words = value if isinstance(value, list) else [value]
        known = [each for each in words if not (isinstance(each, str) and "$" in each)]
        if len(known) == len(words):
            out[name] = value
            continue
        total = plain(name).endswith(("global_batch_size", "train_batch_size")) and "per_device" not in plain(name)
        option = options.get(plain(name), "--global-batch N" if total else None)
        if option is not None and words[0] not in known:
            unset[option] = f"{name.lstrip('-')} = {words[0]}"
        elif commands:
            out[name] = True if not known else known[0] if len(known) == 1 else known
        else:
            out[name] = value
    return out, unset


def _beside(first: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Facts beside the sources; the second take precedence."""
    out = {**first, **more, "notes": [*first.get("notes", ()), *more.get("notes", ())]}
    return {**out, "unset": {**first.get("unset", {}), **more.get("unset", {})}}


def _inline(name: str, text: str) -> dict[str, Any]:
    """Settings of an argument that is a JSON object.

    Raises:
        UsageError: it is not one.
    """
    try:
        found = parse_json(text.encode())
    except Malformed as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from error
    return flattened(found) if isinstance(found, dict) else {}


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


def _of_words(words: list[str], where: str, form: str = "", *, files: bool = True) -> Found:
    """Sources of a command and of the files that it names, and the devices that its launcher starts."""
    environment: dict[str, str] = {}
    while (
        words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL) and not any(each in words[0] for each in ("{",))
    ):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    script = _script_at(words)
    launcher, own = words[:script], words[script:]
    launched = _named(launcher)
    facts = _processes(launched, launcher, environment)
    sources: list[SettingsSource] = []
    if any(Path(word).name == "accelerate" for word in launcher):
        found, more = _with_files(
            find_framework("accelerate"), _without(launched), where, form or "options", Path() if files else None
        )
        sources += [each for each in found if len(each.settings)]
        facts = _beside(more, facts)
    settings = _named(own)
    if "CONFIG_FILE" in environment:
        settings.setdefault("job.config_file", environment["CONFIG_FILE"])
    named = [
        word
        for word in own[1:]
        if word.endswith((".yaml", ".yml", ".toml", ".json")) and not word.startswith("-") and "=" not in word
    ]
    # The first of an option's values is its own; if that is a file, so are the others.
    taken = {
        each
        for value in settings.values()
        for each in (value if isinstance(value, list) and value[0] in named else [value])
        if isinstance(each, str)
    }
    named = [word for word in named if word not in taken]
    framework = _of_command(own, settings)
    for key in [each for each in settings if plain(each) in ("config", "config_file")]:
        stated = settings[key]
        if isinstance(stated, str) and stated.endswith(SUFFIXES[:4]):
            named.append(stated)
            settings.pop(key)
    for file in named if files else ():
        found, more = _of_file(Path(file))
        facts = _beside(more, facts)
        sources += found
        framework = framework or find_framework(found[-1].framework)
    for word in own[1:]:
        if word.startswith("activation_checkpoint:"):
            settings[word] = True
    if framework is None:
        framework = _recognised(settings)
    only_names = framework is None and any(_FILES.get(plain(name)) == "deepspeed" for name in settings)
    if only_names:  # a script of the user's own that gets DeepSpeed's file
        framework = find_framework("deepspeed")
    if framework is not None:
        program = Path(own[0]).name if own else ""
        if program in ("litgpt", "trl") and len(own) > 1:
            settings["subcommand"] = own[1]
        if program in _TRL:
            settings["subcommand"] = program.removesuffix(".py")
        if program == "litgpt" and len(own) > 2 and not own[2].startswith("-"):
            settings.setdefault("model_name", own[2])
        assigned = "assignments" if framework.option.startswith("{key}=") else "options"
        found, more = _with_files(framework, settings, where, form or assigned, Path() if files else None)
        sources += found[:-1] if only_names else found
        facts = _beside(more, facts)
    # An option without a value hides the setting of a file.
    empty = {plain(name) for name, value in (*launched.items(), *settings.items()) if value == ""}
    sources = [
        replace(each, settings={name: v for name, v in each.settings.items() if v == "" or plain(name) not in empty})
        for each in sources
    ]
    return sources, facts


def _named(words: Sequence[str]) -> dict[str, Any]:
    return dict(options_of(words, _FLAGS))


def _without(launched: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in launched.items() if plain(name) not in ("machine_rank", "main_process_port")}


def _script_at(words: Sequence[str]) -> int:
    """Start of the training's own words: its script, its module, or a program that starts ranks itself."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name in ("litgpt", "axolotl", "llamafactory-cli", "trl"):
            return at
        if word == "-m" and at + 1 < len(words) and words[at + 1] not in _MODULES:
            return at + 1
        if name.endswith((".py", ".sh")) and not word.startswith("-"):
            return at
    return len(words) if any(Path(word).name in _PROGRAMS for word in words[:1]) else 0


def _of_command(own: Sequence[str], settings: Settings) -> Framework | None:
    """Framework of a script or program by its name, unless its options contradict it."""
    if not own:
        return None
    name, line = Path(own[0]).name, " ".join(own[:3])
    found: dict[str, int] = {}
    for each in FRAMEWORKS:
        matched = [
            p for p in find_framework(each).programs if any(fnmatchcase(text, p) for text in (own[0], name, line))
        ]
        if matched:
            found[each] = max(map(len, matched))
    best = _recognised(settings)
    if not found:
        return best
    signs = {each: find_framework(each).recognised(settings) for each in found}
    # The one with the most signs, then the one with the most specific program name.
    chosen = find_framework(max(found, key=lambda each: (signs[each], found[each])))
    clearly = best is not None and best.name not in found and best.recognised(settings) > signs[chosen.name] + 1
    return best if clearly else chosen


def _processes(launched: Settings, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Number of devices that a launcher starts ranks on."""
    stated = Stated(launched, COMMAND)
    each = stated.whole("nproc_per_node", "num_gpus", "ntasks_per_node", "gpus_per_node")
    text = str(stated.get("nnodes", "num_nodes", "nodes", "N") or environment.get("NNODES", 1)).rpartition(":")[2]
    hosts = int(text) if text.isdigit() else 1
    for variable in ("NGPU", "NPROC_PER_NODE"):
        if each is None and environment.get(variable, "").isdigit():
            each = int(environment[variable])
    if each is None and (visible := environment.get("CUDA_VISIBLE_DEVICES")) and words[:1] != ["accelerate"]:
        each = len(visible.split(","))
    if (include := stated.get("include")) is not None and ":" in str(include):
        slots = [len(part.partition(":")[2].split(",")) for part in str(include).split("@")]
        return {"devices": sum(slots), "per_host": slots[0]}
    if each is None:
        return {}
    if "$" in text:
        return {"per_host": each, "unset": {"--devices N": f"nnodes = {text}"}}
    return {"devices": each * hosts, "per_host": each}


# -- shells ---------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"(?:^|\|\|)[ \t]*([A-Za-z_]\w*)\+?=\((?!\()(.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
_SCALAR = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|\S*)[ \t]*$", re.MULTILINE)
_VARIABLE = re.compile(
    r"(?P<quote>\")?\$\{(?P<name>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\}(?(quote)\")|\$(?P<bare>[A-Za-z_]\w*)"
)


def _shell_words(text: str, where: str) -> list[str]:
    """Words of the command in a text, or at the end of a script, with its variables and arrays filled in.

    Raises:
        UsageError: it cannot be split into words.
    """
    if "\n" not in text.strip():
        return _split(text, where)
    text = re.sub(r"(?m)^[ \t]*#.*$|(?<=\s)#[^\"'\n]*$", "", text.replace("\\\n", " "))
    values: dict[str, str] = {}
    for match in _ARRAY.finditer(text):
        values[match[1]] = f"{values.get(match[1], '')} {' '.join(match[2].split())}"
    text = _ARRAY.sub("", text)
    for name, value in _SCALAR.findall(text):
        own = re.compile(rf"\$\{{{name}:?-([^}}]*)\}}")  # NAME=${NAME:-default}
        values.setdefault(name, own.sub(lambda match: match[1].strip("\"'"), value.strip("\"'")))
    text = _SCALAR.sub("", text)

    def valued(match: re.Match[str]) -> str:
        """A variable's value or default; an unset one is kept."""
        name, default = match["name"] or match["bare"], match["default"]
        return values.get(name, match[0] if default is None else default.strip("\"'"))

    def filled(line: str) -> str:
        for _ in range(8):
            changed = _VARIABLE.sub(valued, line)
            if changed == line:
                break
            line = changed
        return line

    lines = [filled(line) for line in re.split(r"[\n;]|&&", text) if line.strip()]
    commands = [line for line in lines if any(program in line for program in (*_PROGRAMS, ".py", "torchtitan.train"))]
    chosen = max(commands, key=len, default="")
    if not chosen:  # a file with only flags
        chosen = " ".join(filled(each) for each in values.values() if each.strip().startswith("-"))
    return _split(chosen.replace("exec ", ""), where)


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{where} cannot be split into words: {str(error).lower()}") from None
