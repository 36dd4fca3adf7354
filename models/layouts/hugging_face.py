"""Checkpoints of other tools: found by their contents; and Hugging Face folders, read and written: weights in safetensors by a
model's names, and the tokenizer files.
"""

import json
import shutil
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base._transformers import as_loaded, as_saved, quiet
from ...base.errors import UsageError, WorkloadError
from ...base.reading import path_of
from ..architecture import Architecture, one_line, without_memory
from ..data import TOKENIZER_FILES
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings, is_adapter, with_adapters
from .safetensors_files import INDEX, SINGLE, stored_tensors, whole_folder
from .weights import LazyTensors, Weights, cast, fit

if TYPE_CHECKING:
    import torch

GENERATION = "generation_config.json"


def find_weights(path: Path | str, architecture: Architecture, adapters: Path | str | None = None) -> Weights:
    """Returns the weights of a model in a checkpoint, regardless of its layout.

    Args:
        path: transformers' folder or a .safetensors file; or peft's folder, whose base must be on this machine.
        adapters: peft's folder, for weights of a plain model.

    Raises:
        WorkloadError: it is none of these, cannot be read, or is a checkpoint of another model; the message lists the
            differing tensors.
        UsageError: the path is invalid in every file system.
    """
    folder = path_of(path)
    if (folder / ADAPTER_CONFIG).is_file() and adapters is None:
        base = adapter_settings(folder).get("base_model_name_or_path")
        if not isinstance(base, str) or not Path(base).exists():
            raise WorkloadError(
                f"'{folder}' contains only adapters, of the model '{base}', which is not on this machine: give the folder "
                "of its weights, and this one as its adapters"
            )
        return find_weights(base, architecture, folder)
    weights = hugging_face(folder, architecture)
    return with_adapters(weights, architecture, None if adapters is None else path_of(adapters))


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


def _folders(path: Path | str) -> list[Path]:
    """Folders that may contain files of a checkpoint: its own, and for adapters also that of their base."""
    location = path_of(path)
    folder = location if location.is_dir() else location.parent
    if not (folder / ADAPTER_CONFIG).is_file():
        return [folder]
    base = adapter_settings(folder).get("base_model_name_or_path")
    return [folder, Path(base)] if isinstance(base, str) and Path(base).is_dir() else [folder]


SHARD_BYTES = 5 << 30
"""Largest size of a file; this much is in memory while it is written."""
_TOKENIZER = (
    "*token*.json",
    "vocab*",
    "merges*",
    "*.model",
    "special_tokens*",
    "chat_template*",
    "normalizer.json",
    GENERATION,
)
"""Files of a tokenizer in a folder, and the generation configuration."""


def write_hugging_face(
    weights: Weights,
    architecture: Architecture,
    target: Path | str,
    *,
    dtype: "torch.dtype | None" = None,
    tokenizer: Path | str | None = None,
    generation: Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that `from_pretrained` loads: config.json, safetensors, and the tokenizer's files.

    Names, tied weights and the order within files are those of `save_pretrained`. At most one shard is in memory.

    Args:
        weights: weights of the plain model; adapters are merged before (`merged`), or written by `write_peft`.
        architecture: the model; its adapters are left out.
        target: a folder that does not exist, or is empty.
        dtype: dtype of written floating-point weights; None keeps each as it is.
        tokenizer: a folder whose tokenizer's files are copied, or one such file.
        generation: a generation_config.json to copy; None takes the tokenizer's, or one by the model's configuration.
        max_shard_bytes: largest size of a file.

    Raises:
        WorkloadError: the weights are not of this model.
        UsageError: the folder is not empty, or cannot be written.
    """
    if any(is_adapter(name) for name in weights.tensors):
        raise WorkloadError("these weights have adapters beside them: merge them first, or write the adapters alone")
    model: Any = without_memory(plain(architecture))
    tensors = fit(weights.tensors, model, "what was given").tensors
    if dtype is not None:
        tensors = {
            name: cast(tensor, dtype) if tensor.dtype.is_floating_point else tensor for name, tensor in tensors.items()
        }
    with quiet():
        try:
            stored = as_saved(model, tensors)
        except (TypeError, NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
            raise WorkloadError(
                f"redline cannot save a {architecture.model_type} as transformers does: {one_line(error)}"
            ) from error
    with whole_folder(target) as folder:
        write_safetensors(stored, folder, max_shard_bytes)
        write_configuration(folder, architecture, model, Weights(stored).dtype)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), folder)
        if generation is not None:
            shutil.copyfile(generation, folder / GENERATION)


def write_safetensors(tensors: LazyTensors, folder: Path, max_shard_bytes: int) -> None:
    """Writes tensors to one file, or to shards with an index, split like transformers; one shard is in memory at a time."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=SINGLE.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name].read() for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_configuration(folder: Path, architecture: Architecture, model: Any, dtype: "torch.dtype | None") -> None:
    """Writes config.json and, for a model that generates, generation_config.json."""
    with quiet():
        config = plain(architecture).configuration()
        # Switched off only for training.
        config.use_cache = architecture.arguments.get("use_cache", getattr(type(config)(), "use_cache", True))
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            settings = type(model.generation_config).from_model_config(config)
            settings.use_cache = True
            settings.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a tokenizer's files, but no weights, configuration or code.

    Raises:
        UsageError: there are none.
    """
    files = [source] if source.is_file() else sorted(source.iterdir()) if source.is_dir() else []
    if not source.is_file():
        files = [file for file in files if any(fnmatch(file.name, pattern) for pattern in _TOKENIZER)]
    if not files:
        raise UsageError(f"'{source}' contains no tokenizer: no file like tokenizer.json, vocab.txt or *.model")
    for file in files:
        shutil.copyfile(file, folder / file.name)
