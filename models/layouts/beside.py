"""What lies beside the weights of a checkpoint: its tokenizer, and how the model is to generate."""

from pathlib import Path
from typing import Any

from ...base.errors import WorkloadError
from ...base.reading import path_of
from ..data import TOKENIZER_FILES, load_tokenizer
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings

GENERATION = "generation_config.json"
_PROBE = "The 7 quick brown foxes' fur (naïve, 12.5 %)\n\tdoesn't jump over https://example.org/?a=b 日本語."
"""A text that tokenizers of equal vocabularies may split otherwise."""


def own_tokenizer(path: Path | str) -> Path | None:
    """The folder of the tokenizer that belongs to a checkpoint: its own, or that of the base of adapters; None without one."""
    return next((each for each in _folders(path) if any((each / name).is_file() for name in TOKENIZER_FILES)), None)


def own_generation(path: Path | str) -> Path | None:
    """The file that says how the model of a checkpoint generates; None where there is none."""
    return next((each / GENERATION for each in _folders(path) if (each / GENERATION).is_file()), None)


def difference(given: Path, own: Path) -> str:
    """How a tokenizer departs from the one that weights were learnt with; empty where both make the same tokens.

    Raises:
        WorkloadError: one of them cannot be loaded.
    """
    one, other = load_tokenizer(given), load_tokenizer(own)
    if one is None or other is None:
        raise WorkloadError(f"'{given if one is None else own}' holds no tokenizer")
    mine, its = one.get_vocab(), other.get_vocab()
    if len(mine) != len(its):
        return f"it has {len(mine):,} tokens, and the checkpoint's {len(its):,}"
    differ = sorted(each for each in mine if its.get(each) != mine[each])
    if differ:
        there = its.get(differ[0], "not there")
        return (
            f"{len(differ):,} of {len(mine):,} tokens have another id, such as {differ[0]!r}: {mine[differ[0]]}, and in the "
            f"checkpoint's {there}"
        )
    if _ids(one) != _ids(other):
        return "it has the same tokens and splits texts otherwise"
    return ""


def _ids(tokenizer: Any) -> list[int]:
    return list(tokenizer(_PROBE)["input_ids"])


def _folders(path: Path | str) -> list[Path]:
    """Where what belongs to a checkpoint may lie: its folder, and of adapters the folder of their base behind it."""
    found = path_of(path)
    folder = found if found.is_dir() else found.parent
    if not (folder / ADAPTER_CONFIG).is_file():
        return [folder]
    base = adapter_settings(folder).get("base_model_name_or_path")
    return [folder, Path(base)] if isinstance(base, str) and Path(base).is_dir() else [folder]
