"""What a command trains, as far as it says so itself: in its words, or in the files that it reads."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...reading import LARGEST_DOCUMENT, Refused, parse_yaml, read_named
from .command import Command
from .files import PLACED

MODEL = ("model_name_or_path", "config_name", "base_model_config", "base_model", "model_path", "model_name", "model")
"""What options are called that name a model; the first that is given counts."""
SEQ_LEN = ("max_seq_length", "seq_length", "block_size", "cutoff_len", "sequence_len", "max_seq_len", "seq_len")
"""And those for the tokens of a sample."""
PRECISION = ("mixed_precision", "precision", "dtype", "torch_dtype")
"""And those for the format of products, where these are not switched on as `bf16` and `fp16`."""
_OFF = ("false", "no", "none", "0")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a command says of its training; None where it says nothing, or a template."""

    model: str | None = None
    """By whatever name `redline.workload` may take it."""
    seq_len: int | None = None
    """Tokens of a sample."""
    precision: str | None = None
    """`bf16`, `fp16` or `fp32`."""

    @classmethod
    def by(cls, command: Command) -> "Trained":
        """What is said by `--name value`, `--name=value` and `name=value`, with hyphens too, and by keys of the YAML and
        JSON files that the command names or has rendered."""
        words = _words(command)
        said = dict(_options(words))
        for path in (*words, *(match["file"] for each in command.render if (match := PLACED.fullmatch(each)))):
            for name, value in _keys(path):
                said.setdefault(name, value)
        said = {name: value for name, value in said.items() if "{" not in value}
        length = next((said[name] for name in SEQ_LEN if said.get(name, "").isdigit()), None)
        return cls(
            model=next((said[name] for name in MODEL if said.get(name)), None),
            seq_len=int(length) if length else None,
            precision=_precision(said),
        )


def _precision(said: dict[str, str]) -> str | None:
    for name in ("bf16", "fp16"):
        if name in said and said[name].lower() not in _OFF:
            return name
    for name in PRECISION:
        if value := said.get(name, "").lower():
            if "bf16" in value or "bfloat16" in value:
                return "bf16"
            return "fp16" if "16" in value else "fp32"
    return None


def _words(command: Command) -> list[str]:
    if not isinstance(command.command, str):
        return list(command.command)
    try:
        return shlex.split(command.command)
    except ValueError:  # which is said where it is read as a template
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
    """The scalars at the top of a file of YAML or JSON; nothing where it is none."""
    file = Path(path)
    if file.name.endswith((".yaml", ".yml", ".json", ".yaml.in", ".yml.in", ".json.in")) and file.is_file():
        try:
            document = parse_yaml(read_named(file, at_most=LARGEST_DOCUMENT))
        except (OSError, Refused):  # which is said where it is rendered; of others the command says it
            return
        for name, value in document.items() if isinstance(document, dict) else ():
            if isinstance(value, str | int):
                yield str(name), str(value)
