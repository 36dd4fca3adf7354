"""Hugging Face checkpoint folders: weights in safetensors by a model's names, and the tokenizer files beside them."""

from dataclasses import fields
from pathlib import Path

from ...base._transformers import as_loaded, quiet
from ...base.errors import WorkloadError
from ...base.reading import path_of
from ..architecture import Architecture, one_line, without_memory
from ..data import TOKENIZER_FILES, load_tokenizer
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings
from .safetensors_files import stored_tensors
from .weights import Weights, fit

GENERATION = "generation_config.json"
_PROBE = "The 7 quick brown foxes' fur (naïve, 12.5 %)\n\tdoesn't jump over https://example.org/?a=b 日本語."
"""A text that tokenizers with equal vocabularies may split differently."""


def hugging_face(path: Path | str, architecture: Architecture) -> Weights:
    """Returns the weights of a model in a folder of safetensors, or in one such file.

    Names and layouts of other versions are converted as in `from_pretrained`.

    Args:
        path: a folder with model.safetensors or its index of shards, or a .safetensors file.
        architecture: the model; adapters are left out.

    Raises:
        WorkloadError: it cannot be read, or is a checkpoint of another model; the message lists the differing tensors.
        UsageError: the path is invalid in every file system.
    """
    path = path_of(path)
    model = without_memory(plain(architecture))
    stored = stored_tensors(path)
    with quiet():
        try:
            tensors, unused = as_loaded(model, stored)
        except (TypeError, NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
            raise WorkloadError(
                f"'{path}' contains tensors that transformers converts while it loads this {architecture.model_type}, and "
                f"redline cannot follow: {one_line(error)}; load it with transformers and save it with "
                "save_pretrained(DIR, save_original_format=False)"
            ) from error
    return fit(tensors, model, f"'{path}'", unexpected=unused)


def plain(architecture: Architecture) -> Architecture:
    """The architecture without adapters."""
    return Architecture(**{field.name: getattr(architecture, field.name) for field in fields(Architecture)})


def own_tokenizer(path: Path | str) -> Path | None:
    """Folder of the tokenizer of a checkpoint: its own, or that of the base of adapters; None without one."""
    return next(
        (folder for folder in _folders(path) if any((folder / name).is_file() for name in TOKENIZER_FILES)), None
    )


def own_generation(path: Path | str) -> Path | None:
    """Generation configuration of a checkpoint's model; None if there is none."""
    return next((folder / GENERATION for folder in _folders(path) if (folder / GENERATION).is_file()), None)


def difference(path: Path, checkpoint: Path) -> str | None:
    """Difference between a tokenizer and the one that weights were trained with; None if both make the same tokens.

    Raises:
        WorkloadError: one of them cannot be loaded.
    """
    tokenizer, expected = load_tokenizer(path), load_tokenizer(checkpoint)
    if tokenizer is None or expected is None:
        raise WorkloadError(f"'{path if tokenizer is None else checkpoint}' contains no tokenizer")
    ids, expected_ids = tokenizer.get_vocab(), expected.get_vocab()
    if len(ids) != len(expected_ids):
        return f"it has {len(ids):,} tokens, and the checkpoint's {len(expected_ids):,}"
    if moved := sorted(token for token in ids if expected_ids.get(token) != ids[token]):
        return f"{len(moved):,} of {len(ids):,} tokens have another id, such as {moved[0]!r}"
    if tokenizer(_PROBE)["input_ids"] != expected(_PROBE)["input_ids"]:
        return "it has the same tokens and splits texts otherwise"
    return None


def _folders(path: Path | str) -> list[Path]:
    """Folders that may contain files of a checkpoint: its own, and for adapters also that of their base."""
    location = path_of(path)
    folder = location if location.is_dir() else location.parent
    if not (folder / ADAPTER_CONFIG).is_file():
        return [folder]
    base = adapter_settings(folder).get("base_model_name_or_path")
    return [folder, Path(base)] if isinstance(base, str) and Path(base).is_dir() else [folder]
