"""Detects the layout of a checkpoint, and finds the writer of each layout."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...base.errors import WorkloadError
from ...base.reading import path_of
from ..architecture import Architecture, without_memory
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings, is_adapter, with_adapters, write_peft
from .dcp import METADATA, dcp_tensors
from .hugging_face import hugging_face, plain, write_hugging_face
from .safetensors_files import OTHER_TOOLS
from .weights import Weights, fit

LAYOUTS: Mapping[str, Callable[..., None]] = {
    "hf": write_hugging_face,
    "peft": write_peft,
}
"""Writer of each layout: called with weights, architecture and folder."""

PREFIXES = ("", "model/", "model.", "app.model.")
"""Prefixes of the names of a model's tensors that trainers use in folders of torch.distributed.checkpoint."""


def find_weights(path: Path | str, architecture: Architecture, adapters: Path | str | None = None) -> Weights:
    """Returns the weights of a model in a checkpoint, regardless of its layout.

    Args:
        path: transformers' folder or a .safetensors file; peft's folder, whose base must be on this machine; a folder
            of torch.distributed.checkpoint with the model's own names, or one with such folders of several steps.
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
    steps = [step for step in folder.glob("step-*") if step.name[5:].isdecimal() and (step / METADATA).is_file()]
    if (folder / METADATA).is_file():
        weights = _distributed(folder, architecture)
    elif steps:
        weights = _distributed(max(steps, key=lambda step: int(step.name[5:])), architecture)
    else:
        weights = hugging_face(folder, architecture)
    if any(is_adapter(name) for name in weights.tensors):
        return weights
    return with_adapters(weights, architecture, None if adapters is None else path_of(adapters))


def _distributed(folder: Path, architecture: Architecture) -> Weights:
    """Returns the weights of a model in a folder of torch.distributed.checkpoint, by the model's own names, with its
    adapters if the folder has them.
    """
    stored, model = dcp_tensors(folder), without_memory(plain(architecture))
    prefix = max(PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in stored for name in model.state_dict()))
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    if any(is_adapter(name) for name in tensors):
        return fit(tensors, without_memory(architecture), f"'{folder}'")
    # Without a prefix the optimizer's tensors are among the others.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim")}
    return fit(tensors, model, f"'{folder}'", hint=OTHER_TOOLS)
