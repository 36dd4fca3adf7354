"""Checkpoints as transformers writes them: read by a model's names."""

from dataclasses import fields
from pathlib import Path

from ...base._transformers import as_loaded, quiet
from ...base.errors import WorkloadError
from ...base.reading import Malformed, parse_json, path_of, read_named
from ..architecture import Architecture, one_line, without_memory
from .adapters import with_adapters
from .fit import fit
from .safetensors_files import stored_tensors
from .weights import Weights


def hugging_face(path: Path | str, architecture: Architecture, *, adapters: Path | str | None = None) -> Weights:
    """The weights of a model in a folder of safetensors, or in one such file.

    Names and layouts of other versions are followed as `from_pretrained` follows them. A model with adapters finds
    its original layers by the names they had, and its adapters in `adapters`; else these keep their initial values.

    Args:
        path: a folder with model.safetensors or its index of shards, or a .safetensors file.
        architecture: the model.
        adapters: a folder of peft's, with adapter_model.safetensors and adapter_config.json.

    Raises:
        WorkloadError: it cannot be read, or is a checkpoint of another model; says which tensors differ, and how.
        UsageError: no file system could have such a path.
    """
    path = path_of(path)
    model = without_memory(plain(architecture))
    stored = stored_tensors(path)
    with quiet():
        try:
            found, left = as_loaded(model, stored)
        except (TypeError, NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
            raise WorkloadError(
                f"'{path}' holds tensors that transformers converts while it loads this {architecture.model_type}, and "
                f"redline cannot follow: {one_line(error)}; load it with transformers and save it with "
                "save_pretrained(DIR, save_original_format=False)"
            ) from error
    weights = fit(found, model, f"'{path}'", unexpected=left, hint=_says(path, architecture))
    return with_adapters(weights, architecture, None if adapters is None else path_of(adapters))


def plain(architecture: Architecture) -> Architecture:
    """The architecture without adapters."""
    return Architecture(**{each.name: getattr(architecture, each.name) for each in fields(Architecture)})


def _says(path: Path, architecture: Architecture) -> str:
    """What the configuration beside a checkpoint says it is, where that is another family."""
    folder = path if path.is_dir() else path.parent
    try:
        document = parse_json(read_named(folder / "config.json", at_most=1 << 20))
    except (OSError, Malformed):
        return ""
    family = document.get("model_type") if isinstance(document, dict) else None
    if family in (None, architecture.model_type):
        return ""
    return f"Its config.json says it is a {family}."
