"""The model that a command trains, found in its words and in the files it names."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, read_named
from ...frameworks.framework import Stated
from ...frameworks.launcher import PLACED
from ...frameworks.megatron_model import architecture_of
from ...frameworks.registry import find_launcher
from ...frameworks.stated_space import ForeignSpace
from ...frameworks.trainer import SEQ_LEN as TRAINER_LENGTHS
from ...models.architecture import Architecture
from ...models.presets import PRESETS
from ...models.server_model import ServerModel
from .command import Command

MODEL = ("model_name_or_path", "config_name", "base_model_config", "base_model", "model_path", "model_name", "model")
"""Options that name a model; the first one given counts."""
RECIPE = ("config", "factory", "recipe", "flavor")
"""Options that name a recipe, which may be that of a preset."""
SEQ_LEN = (*TRAINER_LENGTHS, "cutoff_len", "sequence_len", "seq_len")
"""Options for the tokens per sample."""
PRECISION = ("mixed_precision", "precision", "dtype", "torch_dtype")
"""Options for the number format, besides the switches `bf16` and `fp16`."""
_COUNT = re.compile("0*[1-9][0-9]{0,11}")
_OFF = ("false", "no", "none", "0")


@dataclass(frozen=True, kw_only=True)
class CommandTraining:
    """A command's training; None for values that it does not give, or gives as templates."""

    model: str | ServerModel | None = None
    """In a form that `redline.workload` accepts."""
    architecture: Architecture | None = None
    """A model given by its sizes, as with the flags of Megatron-LM."""
    seq_len: int | None = None
    global_batch: int | None = None
    """Samples per step, given by the launcher's option."""
    precision: str | None = None
    """`bf16`, `fp16` or `fp32`."""

    @classmethod
    def by(cls, command: Command) -> "CommandTraining":
        """Reads options `--name value`, `--name=value` and `name=value`, also with hyphens, and, if the command reads
        files, keys of the YAML and JSON files that it names or has rendered.
        """
        words = _words(command)
        options = dict(_options(words))
        files = (*words, *(match["file"] for each in command.render if (match := PLACED.fullmatch(each))))
        for path in files if command.reads_files else ():
            for name, value in _keys(path):
                options.setdefault(name, value)
        options = {name: value for name, value in options.items() if "{" not in value}
        launcher = find_launcher(command.launcher) if command.launcher is not None else None
        total = (launcher.samples(command) if launcher is not None else None) or ""
        length = next((options[name] for name in SEQ_LEN if _is_count(options.get(name, ""))), None)
        stated = next((options[name] for name in MODEL if options.get(name)), None)
        models = (command.named(each) for each in (stated, _preset(options)) if each)
        return cls(
            model=next((model for model in models if model is not None), None),
            architecture=_of_megatron(options),
            seq_len=int(length) if length else None,
            global_batch=int(total) if _is_count(total) else None,
            precision=_precision(options),
        )


def _is_count(text: str) -> bool:
    """True if a text is a whole number of at least 1."""
    return _COUNT.fullmatch(text) is not None


def _preset(options: Mapping[str, str]) -> str | None:
    """Returns a preset named by a recipe, such as torchtitan's and NeMo's `llama3_8b`."""
    names = (options.get(name, "").lower().replace("_", "-") for name in RECIPE)
    return next((name for name in names if name in PRESETS), None)


def _of_megatron(options: Mapping[str, str]) -> Architecture | None:
    """Returns the model that flags of Megatron-LM describe."""
    found = architecture_of(Stated({name: value or True for name, value in options.items()}, "the command"))
    if found is None:
        return None
    arguments = {name: value for name, value in found.items() if name != "model_type"}
    return Architecture(model_type=found["model_type"], arguments=arguments, task="causal")


def _precision(options: dict[str, str]) -> str | None:
    for name in ("bf16", "fp16"):
        if name in options and options[name].lower() not in _OFF:
            return name
    for name in PRECISION:
        if value := options.get(name, "").lower():
            if "bf16" in value or "bfloat16" in value:
                return "bf16"
            return "fp16" if "16" in value else "fp32"
    return None


def _words(command: Command) -> list[str]:
    if not isinstance(command.command, str):
        return list(command.command)
    try:
        return shlex.split(command.command)
    except ValueError:  # reported when the command is parsed as a template
        return []


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, after in zip(words, (*words[1:], "--")):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if equals:
            yield name, value
        elif word.startswith("--"):
            yield name, "" if after.startswith("--") else after


def _keys(path: str) -> Iterator[tuple[str, str]]:
    """Yields the scalars at the top level of a YAML or JSON file."""
    file = Path(path)
    if file.name.endswith((".yaml", ".yml", ".json", ".yaml.in", ".yml.in", ".json.in")) and file.is_file():
        try:
            document = parse_yaml(read_named(file, at_most=LARGEST_DOCUMENT))
        except (OSError, Malformed):  # reported when the file is rendered, or by the command itself
            return
        for name, value in document.items() if isinstance(document, dict) else ():
            if isinstance(value, str | int):
                yield str(name), str(value)


_TRIAL_DIR = "{trial_dir}"


def completed(command: Command, foreign: ForeignSpace) -> Command:
    """Adds the options and files of another tool's space to a command. Values that the command has already are kept.

    Rendered files are read from where they are written for a trial.

    Raises:
        UsageError: the command does not read a rendered file.
    """
    words = command.command
    for option, value in foreign.options:
        words = _with_option(words, option, value)
    placed = [found for each in foreign.render if (found := PLACED.fullmatch(each))]
    own = {(found["file"], found["path"]) for each in command.render if (found := PLACED.fullmatch(each))}
    render = (*command.render, *(each[0] for each in placed if (each["file"], each["path"]) not in own))
    for file in dict.fromkeys(each["file"] for each in placed):
        words = _with_rendered(words, file)
        if _TRIAL_DIR not in (words if isinstance(words, str) else " ".join(words)):
            raise UsageError(
                f"the command does not read {file}, which is written for every trial: add it to the command, as {file} or as "
                f"{_TRIAL_DIR}/{Path(file).name}"
            )
    more: dict[str, Any] = {}
    if foreign.metric is not None and not command.metric:
        more = {"metric": (foreign.metric,), "direction": command.direction or foreign.direction}
    return replace(command, command=words, render=render, **more)


def _with_option(words: str | Sequence[str], option: str, value: str) -> str | Sequence[str]:
    """Sets an option of a command. An existing value is replaced unless it is a template."""
    joined = option.endswith("=")
    options = f"{option}{value}" if joined else f"{option} {value}"
    if isinstance(words, str):
        gap = "" if joined else r"(?:=|\s+)"
        found = re.search(rf"(?:^|(?<=\s)){re.escape(option)}{gap}(?P<value>\S+)", words)
        if found is None:
            return f"{words} {options}"
        return words if "{" in found["value"] else words[: found.start("value")] + value + words[found.end("value") :]
    parts = option.split() if joined else [option]
    for at in range(len(words) - len(parts) + 1):
        here = list(words[at : at + len(parts)])
        if here[:-1] != parts[:-1]:
            continue
        if joined and here[-1].startswith(parts[-1]):
            return (
                words
                if "{" in here[-1]
                else [*words[: at + len(parts) - 1], f"{parts[-1]}{value}", *words[at + len(parts) :]]
            )
        if not joined and here[-1] == option and at + 1 < len(words):
            return words if "{" in words[at + 1] else [*words[: at + 1], value, *words[at + 2 :]]
    return [*words, *(options.split(" ", len(parts) - 1) if joined else (option, value))]


def _with_rendered(words: str | Sequence[str], file: str) -> str | Sequence[str]:
    """Makes a command read a file from where it is written for a trial."""
    there = f"{_TRIAL_DIR}/{Path(file).name}"
    if isinstance(words, str):
        return re.sub(rf"(?:(?<=[\s=])|^)(?:\./)?{re.escape(shlex.quote(file))}(?=\s|$)", lambda match: there, words)
    return [there if Path(each) == Path(file) else each for each in words]
