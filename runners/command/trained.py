"""The model that a command trains, read from its words and from the files that it names."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...frameworks.framework import SettingsReader, plain
from ...frameworks.launcher import PLACED
from ...frameworks.reading import COMMAND, options_of, read, read_document
from ...frameworks.registry import find_framework, find_launcher
from ...frameworks.trainer_config import TrainerConfig
from ...knobs.strategy import SPLITS
from ...models.architecture import Architecture
from ...models.presets import ServerModel, preset_of
from ...space import Config
from .command import Command
from .template import split_words

MODEL = ("base_model_config", "base_model", "model_path")
"""Options that name a model in commands of any trainer, after those of transformers.Trainer."""
RECIPE = ("config", "factory", "recipe", "flavor")
"""Options that name a recipe, which may be that of a preset."""
SEQ_LEN = ("cutoff_len", "sequence_len", "seq_len")
"""Options for the tokens per sample, after those of transformers.Trainer."""
PRECISION = ("mixed_precision", "precision", "dtype", "torch_dtype")
"""Options for the number format, besides the switches `bf16` and `fp16`."""


@dataclass(frozen=True, kw_only=True)
class CommandTraining:
    """A command's training; None for values that are missing or templates."""

    model: str | ServerModel | None = None
    """In a form that `redline.workload` accepts."""
    architecture: Architecture | None = None
    """A model by its sizes, as with the flags of Megatron-LM."""
    seq_len: int | None = None
    global_batch: int | None = None
    """Samples per step."""
    precision: str | None = None
    split: int = 1
    """Devices that share a replica, by the command's degrees of parallelism."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Values of standard knobs by the command, its files and the defaults of its trainer, if that is recognised."""

    @classmethod
    def by(cls, command: Command) -> "CommandTraining":
        """Reads the command as `redline check` does, with the files that it names if it reads files. Facts that no known
        framework gives come from options with a usual name, and from such keys in the files that it names or renders.
        """
        words = _words(command)
        trainer = _trainer(command, words)
        options = _options(command, words)
        explicit: dict[str, Any] = {name: value for name, value in trainer.config.items() if name in trainer.stated}
        launcher = find_launcher(command.launcher) if command.launcher is not None else None
        usual = find_framework("trainer")
        total = SettingsReader({"total": launcher.samples(command) if launcher is not None else None}, COMMAND).whole(
            "total"
        )
        model = next((name for option in (*usual.model, *MODEL) if isinstance(name := options.get(option), str)), None)
        recipes = (preset_of(str(recipe)) for recipe in (trainer.model, *map(options.get, RECIPE)) if recipe)
        models = (command.named(name) for name in (model, *recipes) if name)
        lengths = (trainer.seq_len, *map(options.whole, (*usual.seq_len, *SEQ_LEN)))
        return cls(
            model=next((model for model in models if model is not None), None),
            architecture=_architecture(trainer.architecture) if trainer.architecture else None,
            seq_len=next(filter(None, lengths), None),
            global_batch=total or trainer.global_batch,
            precision=explicit.get("precision") or _precision(options),
            split=prod(explicit.get(name, 1) for name in SPLITS),
            knobs=dict(trainer.config),
        )


def _words(command: Command) -> list[str]:
    """The command's words, with empty ones in place of templates."""
    try:
        words = split_words(command.command) if isinstance(command.command, str) else command.command
    except UsageError:  # reported when the command is parsed as a template
        return []
    split = [(word, *word.partition("=")[:2]) for word in words]
    return [
        word if "{" not in word else f"{name}=" if equals and "{" not in name else "" for word, name, equals in split
    ]


def _trainer(command: Command, words: Sequence[str]) -> TrainerConfig:
    """Returns the training of a known framework, without the files that the command names if they cannot be read; an
    empty one if no framework is recognised.
    """
    # An unreadable file, such as one that the command itself writes, does not hide the options of its words.
    for files in (True, False) if command.reads_files else (False,):
        with suppress(UsageError):
            return read(words, files=files)
    return TrainerConfig(framework="", config=Config({}), stated=frozenset())


def _options(command: Command, words: Sequence[str]) -> SettingsReader:
    """Returns a command's options, and the settings of the files that it names or renders."""
    settings = {plain(name): value[0] if isinstance(value, list) else value for name, value in options_of(words)}
    rendered = (match["file"] for option in command.render if (match := PLACED.fullmatch(option)))
    for file in map(Path, (*words, *rendered) if command.reads_files else ()):
        if file.name.removesuffix(".in").endswith((".yaml", ".yml", ".json")) and file.is_file():
            with suppress(UsageError):  # reported when the file is rendered, or by the command itself
                for name, value in read_document(file).items():
                    settings.setdefault(plain(name), value)
    return SettingsReader({name: value for name, value in settings.items() if "{" not in str(value)}, COMMAND)


def _architecture(config: Mapping[str, Any]) -> Architecture:
    arguments = {name: value for name, value in config.items() if name != "model_type"}
    return Architecture(model_type=config["model_type"], arguments=arguments, task="causal")


def _precision(options: SettingsReader) -> str | None:
    for name in ("bf16", "fp16"):
        if options.has(name) and options.flag(name) is not False:
            return name
    value = str(options.get(*PRECISION) or "").lower()
    if "bf16" in value or "bfloat16" in value:
        return "bf16"
    return None if not value else "fp16" if "16" in value else "fp32"
