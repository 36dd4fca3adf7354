"""Detects the layout of a checkpoint, and finds the writer of each layout."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...base.errors import WorkloadError
from ...base.reading import path_of
from ..architecture import Architecture, without_memory
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings, is_adapter, with_adapters, write_peft
from .dcp import METADATA, dcp_tensors
from .hugging_face import hugging_face, plain
from .lazy import LazyTensors
from .megatron import CONFIG as MEGATRON_CONFIG, TRACKER, iteration_folder, megatron, write_megatron
from .save import write_hugging_face
from .torchtitan import is_torchtitan, step_folder, torchtitan, write_torchtitan
from .weights import Weights, fit

LAYOUTS: Mapping[str, Callable[..., None]] = {
    "hf": write_hugging_face,
    "peft": write_peft,
    "megatron": write_megatron,
    "torchtitan": write_torchtitan,
}
"""Writer of each layout: called with weights, architecture and folder."""

PREFIXES = ("", "model/", "model.", "app.model.")
"""Prefixes of the names of a model's tensors that trainers use in folders of torch.distributed.checkpoint."""


def find_weights(path: Path | str, architecture: Architecture, adapters: Path | str | None = None) -> Weights:
    """Returns the weights of a model in another tool's checkpoint, regardless of its layout.

    Args:
        path: transformers' folder or a .safetensors file; peft's folder, whose base must be on this machine;
            Megatron-LM's folder, of an iteration or of all; torchtitan's, of a step or of all; a folder of
            torch.distributed.checkpoint with the model's own names.
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
    step = step_folder(folder)
    if (folder / TRACKER).is_file() or _is_megatron(iteration_folder(folder)):
        weights = megatron(folder, architecture)
    elif not (step / METADATA).is_file():
        weights = hugging_face(folder, architecture)
    elif is_torchtitan(stored := dcp_tensors(step)):
        weights = torchtitan(step, architecture)
    else:
        weights = _distributed(step, stored, architecture)
    if any(is_adapter(name) for name in weights.tensors):
        return weights
    return with_adapters(weights, architecture, None if adapters is None else path_of(adapters))


def _distributed(folder: Path, stored: LazyTensors, architecture: Architecture) -> Weights:
    """Returns the weights of a model in a folder of torch.distributed.checkpoint, by the model's own names, with its
    adapters if the folder has them.
    """
    prefix = _prefix(stored, architecture)
    named = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    if any(is_adapter(name) for name in named):
        return fit(named, without_memory(architecture), f"'{folder}'")
    # Without a prefix the optimizer's tensors are among the others.
    kept = {name: each for name, each in named.items() if not name.startswith("optim")}
    return fit(kept, without_memory(plain(architecture)), f"'{folder}'")


def _prefix(stored: Iterable[str], architecture: Architecture) -> str:
    """Prefix of a model's names in a folder."""
    stored = set(stored)
    own = without_memory(plain(architecture)).state_dict()
    return max(PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in stored for name in own))


def _is_megatron(folder: Path) -> bool:
    return (folder / MEGATRON_CONFIG).is_file() or any(folder.glob("mp_rank_*"))
