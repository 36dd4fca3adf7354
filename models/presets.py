"""Models by name: those of `presets.yaml`, published shapes and small ones of the same families, and what a server accepts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import WorkloadError, unknown
from ..base.reading import parse_yaml
from .architecture import NAMES
from .data import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model."""

    name: str
    model_type: str
    """The family, as transformers names it."""
    task: Task
    """`causal`, `masked`, `seq2seq` or `image`."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the configuration, as published; the rest are the family's defaults."""
    parameters: int
    """Number of parameters, including the language-model head, tied ones counted once."""
    seq_len: int | None
    """Tokens of a sample: as in pre-training, or 64 for the tiny ones; None for images."""
    global_batch: int
    """Samples of one optimizer step: enough for a choice of micro-batches, few enough to be fast."""

    def shape(self) -> dict[str, int]:
        """`layers` (an encoder's and a decoder's together), `hidden`, `heads` and `vocabulary`; 0 if it does not apply."""
        shape = {
            word: next((self.arguments[name] for name in NAMES[word] if name in self.arguments), 0)
            for word in ("layers", "hidden", "heads", "vocabulary")
        }
        if self.task == "seq2seq":
            shape["layers"] *= 2
        if self.model_type == "wide_resnet":
            # Residual blocks, and channels of the last of them.
            shape["layers"] = (self.arguments["depth"] - 4) // 2
            shape["hidden"] = 64 * self.arguments["width"]
        return shape


def _read() -> dict[str, Preset]:
    rows = parse_yaml(Path(__file__).with_name("presets.yaml").read_bytes())
    return {
        name: Preset(name=name, model_type=row.pop("family"), seq_len=row.pop("seq_len", None), **row)
        for name, row in rows.items()
    }


PRESETS: Mapping[str, Preset] = _read()
"""All presets by name, the tiny ones first."""


_ENDINGS = re.compile(r"-(hf|instruct|thinking|chat|base|it|pretrain|v\d[\d.]*|sft|uncased|\d{4})$")


def preset_of(name: str) -> str | None:
    """The preset that a hub id or a recipe's name refers to; None if there is none.

    >>> preset_of("meta-llama/Meta-Llama-3-8B-Instruct"), preset_of("llama3_8b"), preset_of("deepseek_v3-671B")
    ('llama3-8b', 'llama3-8b', 'deepseek-v3')
    """
    shortened = name.lower().rpartition("/")[2].replace("_", "-").removeprefix("meta-")
    while shortened not in PRESETS and (shorter := _ENDINGS.sub("", shortened)) != shortened:
        shortened = shorter
    joined = re.sub(r"^([a-z]+)-(\d)", r"\1\2", shortened)
    # Llama 3.1 and 3.3 have the sizes of Llama 3.
    for candidate in (shortened, joined, re.sub(r"^llama3\.[13]-", "llama3-", joined)):
        if candidate in PRESETS:
            return candidate
    # A family of one size, which the name states.
    family, _, size = shortened.rpartition("-")
    preset = PRESETS.get(family)
    return family if preset is not None and size == f"{preset.parameters / 1e9:.0f}b" else None


def list_presets() -> list[dict[str, Any]]:
    """A row per preset: name, family, parameters, layers, hidden, heads, vocabulary, seq_len, global_batch."""
    return [
        {
            "name": preset.name,
            "family": preset.model_type,
            "parameters": preset.parameters,
            **preset.shape(),
            "seq_len": preset.seq_len,
            "global_batch": preset.global_batch,
        }
        for preset in PRESETS.values()
    ]


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
LONGEST_NAME = 200  # a hub id has at most 96 characters
_LOADED_BY_NAME = ("backbone", "backbone_kwargs", "use_pretrained_backbone", "use_timm_backbone")
"""Keys of a config.json that make transformers load another model, from anywhere."""
_LOADERS = ("timm_backbone", "timm_wrapper")
"""Model types whose models another library finds by a name, which may be a folder's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerModel:
    """A model named in another user's request.

    It is resolved without looking at files of this machine: the name is looked up among the presets, or requested from
    the hub's client (including its cache), and never opened, imported or unpickled. Code that comes with a model is
    not run.
    """

    name: str
    """A preset's name or a hub id; for contents, their display name."""
    contents: Mapping[str, Any] | None = None
    """Contents of a Hugging Face config.json; None if there is only a name."""
    kept: Path | None = None
    """File that the server has written the contents to, for references in a run's files. It is not read."""

    @classmethod
    def named(cls, text: str) -> "ServerModel":
        """Returns the model of a preset's name or a hub id.

        Raises:
            WorkloadError: it is neither.
        """
        if not isinstance(text, str) or not _is_name(text):
            raise WorkloadError(
                f"{unknown('model', str(text)[:80], PRESETS)} A hub id (owner/name) works too; a server opens no files of that "
                "name: a config.json travels as `model`, a Python file as `workload`."
            )
        return cls(name=text)

    @classmethod
    def of(cls, contents: Any, kept: Path | None = None) -> "ServerModel":
        """Returns the model of a config.json's contents.

        Raises:
            WorkloadError: they are not a mapping, or load another model by its name.
        """
        if not isinstance(contents, Mapping):
            raise WorkloadError("a model's configuration must be a mapping, such as that of a Hugging Face config.json")
        for name, value in _entries(contents):
            if (name in _LOADED_BY_NAME and value) or (name == "model_type" and value in _LOADERS):
                raise WorkloadError(
                    f"the configuration has {name}={str(value)[:80]!r}, with which transformers loads a model from elsewhere; a "
                    "server takes architectures that transformers builds itself"
                )
        return cls(name=str(contents.get("model_type", "model"))[:100], contents=contents, kept=kept)

    @property
    def is_preset(self) -> bool:
        return self.contents is None and self.name in PRESETS

    def __str__(self) -> str:
        return self.name


def _is_name(text: str) -> bool:
    return text in PRESETS or (
        len(text) <= LONGEST_NAME and ".." not in text and "--" not in text and _HUB_ID.fullmatch(text) is not None
    )


def _entries(document: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a mapping and of nested mappings."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield str(name), value
            yield from _entries(value)
    elif isinstance(document, list):
        for item in document:
            yield from _entries(item)
