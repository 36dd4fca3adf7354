"""Reads a file or a command of another trainer as a configuration."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_json, parse_yaml, path_of, read_named
from .framework import (
    Framework,
    OpenedFile,
    Settings,
    SettingsReader,
    as_flag,
    file_kind,
    flattened,
    harmless_settings,
    is_harmless,
    other_trainers,
    plain,
    signs_among,
)
from .registry import FRAMEWORKS, find_framework
from .shell import PROGRAMS, command_of
from .trainer_config import SettingsSource, TrainerConfig, combined

SUFFIXES = (".toml", ".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch", ".txt")
"""File endings that are recognised; from `.sh` on those of scripts."""
COMMAND = "the command"
"""Name of a command in messages, as the path is that of a file."""
BEFORE_SCRIPT = ", before the script"
"""Where options of a launcher stand in a command: what follows the script is passed to that."""


def read(
    source: str | os.PathLike[str] | Sequence[str], *, files: bool = True, framework: str | None = None
) -> TrainerConfig:
    """Reads a file (TOML, YAML, JSON, a shell script) or a command, as a text or its words.

    >>> made = read("torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size 2 --bf16")
    >>> made.framework, made.devices, made.config["tp"]
    ('megatron', 8, 4)

    Args:
        source: a path, a command, or its words.
        files: False to open no file that a command names.
        framework: the framework to read it as, if nothing in it is one framework's alone.

    Raises:
        UsageError: a file cannot be read, or no framework is recognised; the message lists the known ones.
    """
    chosen = None if framework is None else find_framework(framework)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_file(source)):
        sources, launcher_facts = _read_file(path_of(source), chosen)
    else:
        folder = Path() if files else None
        words, unknown_lines = command_of(source, COMMAND, folder) if isinstance(source, str) else (list(source), [])
        sources, launcher_facts = _read_command(words, COMMAND, chosen, files=files)
        launcher_facts = _merge_facts(launcher_facts, {"notes": _not_understood(unknown_lines)})
    if not sources:
        raise UsageError(_unrecognised(str(source) if isinstance(source, os.PathLike) else source, {}))
    return combined(sources, launcher_facts)


def _is_file(source: str) -> bool:
    return source.strip().endswith(SUFFIXES) and (len(source.split()) == 1 or Path(source).is_file())


def _not_understood(lines: Sequence[str]) -> list[str]:
    return [f"this line of the script is not understood, and may change the command: {line[:100]}" for line in lines]


def _unrecognised(source: str | Sequence[str], settings: Settings) -> str:
    """Why no framework is recognised."""
    shown_text = source if isinstance(source, str) else shlex.join(source)
    other_trainer = _other(settings)
    if other_trainer is not None:
        return (
            f"'{shown_text[:100]}' has settings of {other_trainer}, which redline check does not read; --framework NAME reads "
            f"it as another trainer's: {', '.join(FRAMEWORKS)}"
        )
    signs = ", ".join(
        f"{find_framework(name).title} ({find_framework(name).signs[0].replace(' & ', ' with ')})"
        for name in FRAMEWORKS
    )
    return (
        f"no framework is recognised in '{shown_text[:100]}': nothing in it is of one trainer alone; --framework NAME names "
        f"the trainer, or add what only it has: {signs}"
    )


def _other(settings: Settings) -> str | None:
    """A trainer that is not read and alone has some of these settings."""
    return next((title for title, signs in other_trainers().items() if signs_among(signs, settings)), None)


SourcesAndFacts = tuple[list[SettingsSource], dict[str, Any]]
"""Sources, the least important first, and settings of a launcher."""


def _read_file(path: Path, chosen: Framework | None = None) -> SourcesAndFacts:
    if path.suffix not in SUFFIXES[:4]:
        words, unknown_lines = command_of(_text(path), str(path), path.parent)
        sources, facts = _read_command(words, str(path), chosen)
        return sources, _merge_facts(facts, {"notes": _not_understood(unknown_lines)})
    settings = read_document(path)
    framework = _recognised(settings)
    if chosen is not None and (framework is None or framework.is_common):
        framework = chosen
    if framework is None:
        raise UsageError(_unrecognised(str(path), settings))
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
    """The framework that alone has some of these settings; if several do, that with the most, transformers.Trainer last."""
    if _other(settings) is not None:
        return None
    counts = {name: find_framework(name).recognised(settings) for name in FRAMEWORKS}
    name = max(counts, key=lambda name: (counts[name] > 0, name != "trainer", counts[name]))
    return find_framework(name) if counts[name] else None


_STAGE = re.compile(r"(?:zero|z|stage)[-_]?([0-3])", re.IGNORECASE)
_OFFLOADS = re.compile(r"(?<!no)(?<!no[-_])offload", re.IGNORECASE)


def _with_files(
    framework: Framework, settings: dict[str, Any], where: str, form: str, folder: Path | None
) -> SourcesAndFacts:
    """A source, preceded by those of the files that it names, relative to a folder; None: they are not opened."""
    sources: list[SettingsSource] = []
    facts: dict[str, Any] = {"notes": []}
    own_settings = dict(settings)
    if engine := {name: value for name, value in settings.items() if name.startswith("deepspeed.")}:
        own_settings = {name: value for name, value in settings.items() if name not in engine}
        nested_source = _source(
            "deepspeed", {name.partition(".")[2]: value for name, value in engine.items()}, where, form
        )
        sources.append(replace(nested_source, section="deepspeed."))
    for name, value in own_settings.copy().items():
        if plain(name) == "fsdp_config" and isinstance(value, str) and value.lstrip().startswith("{"):
            own_settings |= {f"fsdp_config.{key}": field_value for key, field_value in _inline(name, value).items()}
            own_settings[name] = OpenedFile(value)
        kind = file_kind(name)
        if kind is None or folder is None or not isinstance(value, str) or "$" in value:
            continue
        # DeepSpeed takes a file of any name.
        if not value.endswith(SUFFIXES[:4]) and (kind != "deepspeed" or as_flag(value) is not None):
            continue
        file = next((candidate for candidate in (Path(value), folder / value) if candidate.is_file()), None)
        if file is None:
            stage = _STAGE.search(Path(value).stem)
            if kind != "deepspeed" or stage is None:
                raise UsageError(f"{where}: the file {value} of {name} is not there")
            file_settings, is_whole = _engine_by_name(Path(value).stem, int(stage[1]))
            if not is_whole:
                facts["unread"] = {name: value}
            offloaded = [part for part in ("optimizer", "param") if _offload(part) in file_settings]
            parts_text = f" with offloaded {' and '.join(offloaded)}" if offloaded else ""
            facts["notes"].append(
                f"{name}: {value} is not there; by its name it is ZeRO stage {stage[1]}{parts_text}, and what else it sets is "
                "not known"
            )
            own_settings[name] = OpenedFile(value)
        else:
            file_settings = read_document(file)
            own_settings[name] = OpenedFile(value)
            if kind == "trainer":
                own_settings |= {f"fsdp_config.{key}": field_value for key, field_value in file_settings.items()}
                continue
        file_name = str(file) if file is not None else value
        file_form = "json" if file_name.endswith(".json") else Path(file_name).suffix.lstrip(".")
        sources.append(_source(kind, file_settings, file_name, file_form))
    commands = form in ("options", "assignments")
    own_settings, facts["unset"], unknown = _without_variables(framework, own_settings, commands=commands)
    facts["notes"] += [f"{variable} is not set: what it adds to the command is not known" for variable in unknown]
    sources.append(_source(framework.name, own_settings, where, form))
    return sources, facts


def _engine_by_name(name: str, stage: int) -> tuple[dict[str, Any], bool]:
    """Settings of DeepSpeed that the name of an absent file tells, and False if its offload may be of the weights or not."""
    settings: dict[str, Any] = {"zero_optimization.stage": stage}
    if _OFFLOADS.search(name) is None:
        return settings, True
    named = [part for part in ("optimizer", "param") if part[:5] in name.lower() or "_all" in name.lower()]
    possible = ["optimizer", "param"] if stage == 3 else ["optimizer"]
    return settings | {_offload(part): "cpu" for part in named or possible}, bool(named) or len(possible) == 1


def _offload(part: str) -> str:
    return f"zero_optimization.offload_{part}.device"


def _without_variables(
    framework: Framework, settings: Settings, *, commands: bool
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Settings without unset variables, the sizes that are unknown without them, by redline's option, and the variables that may
    be further options of a command. An option of a command that has only such a value is a flag."""
    options = {plain(key): f"--fix {knob}=N" for knob, table in framework.knobs.items() for key in table.keys}
    options |= {plain(key): "--seq-len N" for key in framework.seq_len}
    options |= {plain(key): "--model MODEL" for key in framework.model}
    options |= {plain(key): "--fix zero=N" for key in settings if file_kind(key) == "deepspeed"}
    kept_settings: dict[str, Any] = {}
    unset: dict[str, str] = {}
    unknown: list[str] = []
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
            if literals or not is_harmless(name, harmless_settings(framework.name)):
                unknown += [item for item in items if item not in literals]
            kept_settings[name] = True if not literals else literals[0] if len(literals) == 1 else literals
        else:
            kept_settings[name] = value
    return kept_settings, unset, unknown


def _merge_facts(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the facts of two launchers; those of the inner one take precedence."""
    facts = {**outer, **inner, "notes": [*outer.get("notes", ()), *inner.get("notes", ())]}
    for name in ("unset", "unread"):
        facts[name] = {**outer.get(name, {}), **inner.get(name, {})}
    return facts


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

_FLAGS = frozenset((
    "standalone", "no_python", "module", "multi_gpu", "use_fsdp", "use_deepspeed", "cpu", "use_cpu", "no_local_rank",
    "exclusive", "debug", "quiet", "same_network",
))  # fmt: skip
"""Options of launchers without a value."""
_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner", *_ACCELERATE)
_ASSIGNED = re.compile(r"\+{0,2}([A-Za-z_~][\w.~/@]*)=((?!.*,\w+=).*)", re.DOTALL)
_PAIRS = ("optim_args",)
"""Options whose value is `name=value,...`."""


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
            if plain(name) in _PAIRS:
                values, position = list(words[position : position + 1]), position + 1
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


def _read_command(
    words: list[str], where: str, chosen: Framework | None = None, *, files: bool = True
) -> SourcesAndFacts:
    """Sources of a command and of the files that it names, and the devices that its launcher starts."""
    words, environment = list(words), {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL) and "{" not in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    script = _script_at(words)
    launcher, command = words[:script], words[script:]
    program = Path(command[0]).name if command else ""
    if program == "axolotl" and "--" in command:  # what follows is its launcher's, by default accelerate's
        separator = command.index("--")
        chosen_launcher = str(dict(options_of(command[:separator])).get("launcher", "accelerate"))
        launcher, command = [*launcher, chosen_launcher, *command[separator + 1 :]], command[:separator]
    if launcher[-1:] == ["-m"]:
        launcher = launcher[:-1]
    launched = dict(options_of(launcher, _FLAGS))
    if program == "run_train.sh":  # torchtitan's, with its defaults
        environment.setdefault("NGPU", "8")
    facts = _processes(launched, launcher, environment)
    sources: list[SettingsSource] = []
    if names := [word for word in launcher if Path(word).name in _ACCELERATE]:
        options = dict(options_of(launcher[launcher.index(names[0]) + 1 :], _FLAGS))
        launcher_sources, further = _with_files(
            find_framework("accelerate"), options, where + BEFORE_SCRIPT, "options", Path() if files else None
        )
        sources += [source for source in launcher_sources if len(source.settings)]
        facts = _merge_facts(further, facts)
    settings = dict(options_of(command))
    if program == "run_train.sh":
        for variable, option in (("CONFIG_FILE", "job.config_file"), ("MODULE", "module"), ("CONFIG", "config")):
            if variable in environment:
                settings.setdefault(option, environment[variable])
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
    by_program = next((candidate for candidate in map(find_framework, FRAMEWORKS) if _starts(candidate, command)), None)
    dashes = [word for word in command[1:] if word.startswith("-") and not _is_negative(word)]
    if by_program is not None and settings and not dashes and not by_program.assigns:
        by_program = None  # its programs take flags; one of that name that takes assignments is another's
    # The program as a setting, which signs of other trainers have.
    named_settings = settings | {f"program.{Path(word).name}": True for word in words[:1]}
    if chosen is None and _other(named_settings) is not None:
        raise UsageError(_unrecognised(words, named_settings))
    framework = by_program or _recognised(settings)
    for key in [key_name for key_name in settings if plain(key_name) in ("c", "config", "config_file")]:
        config_file = settings[key]
        if isinstance(config_file, str) and config_file.endswith(SUFFIXES[:4]):
            config_files.append(config_file)
            settings.pop(key)
    uses_engine = any(file_kind(name) == "deepspeed" and isinstance(value, str) for name, value in settings.items())
    for file in config_files if files else ():
        if (sources or uses_engine) and not (framework or chosen or _recognised(read_document(Path(file)))):
            facts = _merge_facts(facts, {"unread": {file: "a file"}})
            continue
        file_sources, further = _read_file(Path(file), framework or chosen)
        facts = _merge_facts(further, facts)
        sources += file_sources
        framework = framework or find_framework(file_sources[-1].framework)
    for word in command[1:]:
        if word.startswith("activation_checkpoint:"):
            settings["activation_checkpoint.mode"] = word.partition(":")[2]
    framework = framework or chosen
    if framework is None and settings and not sources and not uses_engine:
        raise UsageError(_unrecognised(words, settings))
    if framework is None:  # a script of the user's own, with a file of DeepSpeed or accelerate
        engine = {name: value for name, value in settings.items() if file_kind(name) == "deepspeed"}
        engine_sources, further = _with_files(
            find_framework("deepspeed"), engine, where, "options", Path() if files else None
        )
        sources += engine_sources[:-1]
        user_settings = {
            name: value
            for name, value in settings.items()
            if name not in engine and not is_harmless(name, harmless_settings("every"))
        }
        facts = _merge_facts(_merge_facts(further, facts), {"unread": user_settings})
    else:
        if command:
            facts = _merge_facts({"notes": [*framework.read_words(command, settings)]}, facts)
        assigns = framework.assigns and (not dashes or any(_ASSIGNED.fullmatch(word) for word in command[1:]))
        command_sources, further = _with_files(
            framework, settings, where, "assignments" if assigns else "options", Path() if files else None
        )
        sources += command_sources
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
    return len(words) if any(Path(word).name in PROGRAMS for word in words[:1]) else 0


def _starts(framework: Framework, command: Sequence[str]) -> bool:
    """True if a command's script, module or program is one that only this framework has."""
    spellings = (command[0], Path(command[0]).name, " ".join(command[:3])) if command else ()
    return any(fnmatchcase(spelling, program) for spelling in spellings for program in framework.programs)


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
