"""Which layout a checkpoint has, and what writes each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import WorkloadError
from ...reading import path_of
from ..architecture import Architecture
from .adapters import CONFIG as ADAPTER_CONFIG, adapter_settings, write_peft
from .dcp import METADATA
from .hugging_face import hugging_face
from .megatron import CONFIG as MEGATRON_CONFIG, TRACKER, iteration_folder, megatron, write_megatron
from .save import write_hugging_face
from .torchtitan import step_folder, torchtitan, write_torchtitan
from .weights import Weights

LAYOUTS: Mapping[str, Callable[..., None]] = {
    "hf": write_hugging_face,
    "peft": write_peft,
    "megatron": write_megatron,
    "torchtitan": write_torchtitan,
}
"""What writes each layout: called with weights, architecture and folder."""


def find_weights(path: Path | str, architecture: Architecture, adapters: Path | str | None = None) -> Weights:
    """The weights of a model in another tool's checkpoint, whichever it is.

    Args:
        path: transformers' folder or a .safetensors file; peft's folder, whose base lies where it says, on this machine;
            Megatron-LM's folder, of an iteration or of all; torchtitan's, of a step or of all.
        architecture: the model.
        adapters: peft's folder beside weights of a plain model.

    Raises:
        WorkloadError: it is none of these, cannot be read, or is a checkpoint of another model: says which tensors
            differ, and how.
        UsageError: no file system could have such a path.
    """
    folder = path_of(path)
    if (folder / ADAPTER_CONFIG).is_file() and adapters is None:
        base = adapter_settings(folder).get("base_model_name_or_path")
        if not isinstance(base, str) or not Path(base).exists():
            raise WorkloadError(
                f"'{folder}' holds adapters alone, of the model '{base}', which is not on this machine: give the folder "
                "of its weights, and this one as its adapters"
            )
        return find_weights(base, architecture, folder)
    if (folder / TRACKER).is_file() or _is_megatron(iteration_folder(folder)):
        return megatron(folder, architecture, adapters=adapters)
    if (step_folder(folder) / METADATA).is_file():
        return torchtitan(folder, architecture, adapters=adapters)
    return hugging_face(folder, architecture, adapters=adapters)


def _is_megatron(folder: Path) -> bool:
    return (folder / MEGATRON_CONFIG).is_file() or any(folder.glob("mp_rank_*"))
