"""Writes checkpoints for transformers, shard by shard."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base._transformers import as_saved, quiet
from ...base.errors import UsageError, WorkloadError
from ..architecture import Architecture, one_line, without_memory
from .adapters import is_adapter
from .hugging_face import GENERATION, plain
from .lazy import LazyTensors, cast
from .safetensors_files import INDEX, SINGLE, whole_folder
from .weights import Weights, fit

if TYPE_CHECKING:
    import torch

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
