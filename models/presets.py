"""Named models of `presets.yaml`: published shapes, and small ones of the same families."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
