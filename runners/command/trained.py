"""The model that a command trains, found in its words and in the files it names."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...frameworks.framework import Stated, plain
from ...frameworks.launcher import PLACED
from ...frameworks.reading import COMMAND, TrainerConfig, options_of, read, read_document
from ...frameworks.registry import find_launcher
from ...frameworks.stated_space import ForeignSpace
from ...frameworks.trainer import MODEL as TRAINER_MODEL, SEQ_LEN as TRAINER_LENGTHS
from ...knobs.strategy import SPLITS
from ...models.architecture import Architecture
from ...models.presets import preset_of
from ...models.server_model import ServerModel
from ...space import Config
from .command import Command
from .template import split_words

MODEL = (*TRAINER_MODEL, "base_model_config", "base_model", "model_path")
"""Options that name a model in commands of any trainer; the first one given counts."""
RECIPE = ("config", "factory", "recipe", "flavor")
"""Options that name a recipe, which may be that of a preset."""
SEQ_LEN = (*TRAINER_LENGTHS, "cutoff_len", "sequence_len", "seq_len")
"""Options for the tokens per sample."""
PRECISION = ("mixed_precision", "precision", "dtype", "torch_dtype")
"""Options for the number format, besides the switches `bf16` and `fp16`."""


@dataclass(frozen=True, kw_only=True)
class CommandTraining:
    """A command's training; None for values that it does not give, or gives as templates."""

    model: str | ServerModel | None = None
    """In a form that `redline.workload` accepts."""
    architecture: Architecture | None = None
    """A model given by its sizes, as with the flags of Megatron-LM."""
    seq_len: int | None = None
    global_batch: int | None = None
    """Samples per step."""
    precision: str | None = None
    split: int = 1
    """Devices that share a replica by the degrees that the command gives."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Values of standard knobs by the command, its files and the defaults of its trainer, if that is recognised."""

    @classmethod
    def by(cls, command: Command) -> "CommandTraining":
        """Reads the command as `redline check` does, with the files that it names if it reads files. Facts that no known
        framework gives are those of options with a usual name, and of such keys in the files that it names or renders.
        """
        words = _words(command)
        found = _trainer(command, words)
        usual = _usual(command, words)
        stated: dict[str, Any] = {name: value for name, value in found.config.items() if name in found.stated}
        launcher = find_launcher(command.launcher) if command.launcher is not None else None
        total = Stated({"total": launcher.samples(command) if launcher is not None else None}, COMMAND).whole("total")
        model = next((name for each in MODEL if isinstance(name := usual.get(each), str)), None)
        recipes = (preset_of(str(each)) for each in (found.model, *map(usual.get, RECIPE)) if each)
        models = (command.named(each) for each in (model, *recipes) if each)
        lengths = (found.seq_len, *map(usual.whole, SEQ_LEN))
        return cls(
            model=next((model for model in models if model is not None), None),
            architecture=_architecture(found.architecture) if found.architecture else None,
            seq_len=next(filter(None, lengths), None),
            global_batch=total or found.global_batch,
            precision=stated.get("precision") or _precision(usual),
            split=prod(stated.get(name, 1) for name in SPLITS),
            knobs=dict(found.config),
        )


def _words(command: Command) -> list[str]:
    """The command's words, with empty ones in place of templates."""
    try:
        words = split_words(command.command) if isinstance(command.command, str) else command.command
    except UsageError:  # reported when the command is parsed as a template
        return []
    parts = [(word, *word.partition("=")[:2]) for word in words]
    return [
        word if "{" not in word else f"{name}=" if equals and "{" not in name else "" for word, name, equals in parts
    ]


def _trainer(command: Command, words: Sequence[str]) -> TrainerConfig:
    """Returns the training of a known framework, without the files that the command names if they cannot be read; an
    empty one if no framework is recognised.
    """
    for files in (True, False) if command.reads_files else (False,):
        with suppress(UsageError):
            return read(words, files=files)
    return TrainerConfig(framework="", config=Config({}), stated=frozenset())


def _usual(command: Command, words: Sequence[str]) -> Stated:
    """Returns a command's options, and the settings of the files that it names or renders."""
    settings = {plain(name): value[0] if isinstance(value, list) else value for name, value in options_of(words)}
    rendered = (match["file"] for each in command.render if (match := PLACED.fullmatch(each)))
    for file in map(Path, (*words, *rendered) if command.reads_files else ()):
        if file.name.removesuffix(".in").endswith((".yaml", ".yml", ".json")) and file.is_file():
            with suppress(UsageError):  # reported when the file is rendered, or by the command itself
                for name, value in read_document(file).items():
                    settings.setdefault(plain(name), value)
    return Stated({name: value for name, value in settings.items() if "{" not in str(value)}, COMMAND)


def _architecture(config: Mapping[str, Any]) -> Architecture:
    arguments = {name: value for name, value in config.items() if name != "model_type"}
    return Architecture(model_type=config["model_type"], arguments=arguments, task="causal")


def _precision(usual: Stated) -> str | None:
    for name in ("bf16", "fp16"):
        if usual.has(name) and usual.flag(name) is not False:
            return name
    value = str(usual.get(*PRECISION) or "").lower()
    if "bf16" in value or "bfloat16" in value:
        return "bf16"
    return None if not value else "fp16" if "16" in value else "fp32"


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
