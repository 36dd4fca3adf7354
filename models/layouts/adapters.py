"""Low-rank adapters in peft's format: reads, writes, and merges them into the adapted weights."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ...base.option import option
from ...base.reading import Malformed, parse_json, read_named
from ..architecture import Architecture, without_memory
from ..lora import AdaptedArchitecture
from .safetensors_files import file_tensors, whole_folder
from .weights import Box, LazyTensor, LazyTensors, Weights, shape_differences

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of peft's names: its own two modules around the model."""
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""peft's names of tasks; it has none for the others."""
_ADAPTER = re.compile(r"\.(lora_[AB])\.default\.")


def with_adapters(weights: Weights, architecture: Architecture, adapters: Path | None) -> Weights:
    """Returns the weights of a plain model, by the names of the same model with adapters.

    Args:
        weights: weights of the plain model.
        architecture: with adapters; without, the weights are returned unchanged.
        adapters: peft's folder; None leaves adapters at their initial values.

    Raises:
        WorkloadError: the folder contains adapters of another kind, rank or of other layers; or the model has none.
    """
    if not isinstance(architecture, AdaptedArchitecture):
        if adapters is not None:
            raise WorkloadError(
                f"'{adapters}' contains adapters, but this {architecture.model_type} is trained without; give "
                f"{option('lora')} r=..., or merge them first: redline convert --merge"
            )
        return weights
    model = without_memory(architecture)
    base = {name: weights.tensors.get(base_name(name)) for name in model.state_dict() if not is_adapter(name)}
    tensors = {name: tensor for name, tensor in base.items() if tensor is not None}
    if adapters is not None:
        adapter_tensors = read_adapters(adapters, architecture)
        _check_adapters(f"'{adapters}'", model, adapter_tensors)
        tensors |= adapter_tensors
    return Weights(tensors, weights.notes)


def is_adapter(name: str) -> bool:
    """True if a name in a model with adapters is that of an adapter."""
    return _ADAPTER.search(name) is not None


def base_name(name: str) -> str:
    """Name of an adapted layer's tensor in the plain model."""
    return name.replace(".base_layer.", ".")


def read_adapters(folder: Path, architecture: AdaptedArchitecture) -> dict[str, LazyTensor]:
    """Reads the adapters in peft's folder, by the model's names.

    Raises:
        WorkloadError: it is not such a folder, or its adapters are of another kind, or have another scale than the
            model's.
    """
    settings = adapter_settings(folder)
    kind = settings.get("peft_type")
    extra = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if settings.get(key)]
    if kind != "LORA" or extra or settings.get("bias", "none") != "none":
        difference = extra[0] if extra else f"bias={settings.get('bias')}" if kind == "LORA" else f"peft_type {kind}"
        raise WorkloadError(
            f"'{folder}' contains adapters with {difference}; redline trains plain LoRA, without biases"
        )
    lora, r, alpha = architecture.lora, settings.get("r"), settings.get("lora_alpha")
    if (r, alpha) != (lora.r, lora.alpha or lora.r):
        raise WorkloadError(
            f"'{folder}' contains adapters of r={r}, alpha={alpha}, and the model has r={lora.r}, "
            f"alpha={lora.alpha or lora.r:g}: give {option('lora', f'r={r},alpha={alpha}')}"
        )
    stored = file_tensors(folder / WEIGHTS)
    return {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(PREFIX)): tensor
        for name, tensor in stored.items()
    }


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Contents of adapter_config.json.

    Raises:
        WorkloadError: it is missing or cannot be read.
    """
    try:
        return dict(parse_json(read_named(folder / CONFIG, at_most=1 << 20)))
    except (OSError, Malformed, TypeError, ValueError) as error:
        raise WorkloadError(f"'{folder}' is not a folder of adapters: {CONFIG}: {error}") from error


def merged(weights: Weights, architecture: AdaptedArchitecture) -> Weights:
    """Returns the weights of the plain model with each adapter added to its layer, `W + alpha / r * B A`.

    The sum is computed in float32 and rounded to the dtype of the weights.

    Raises:
        WorkloadError: an adapter is missing.
    """
    transposed, scale = _transposed(without_memory(architecture)), architecture.lora.scale
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in weights.tensors.items():
        layer = name.removesuffix(".base_layer.weight")
        if layer != name:
            factors = [f"{layer}.lora_{factor}.default.weight" for factor in ("B", "A")]
            if missing := [factor for factor in factors if factor not in weights.tensors]:
                raise WorkloadError(f"the adapter {missing[0]} is missing, so nothing can be merged")
            up, down = (weights.tensors[factor] for factor in factors)
            tensor = add_product(tensor, up, down, scale, transposed=layer in transposed)
        if not is_adapter(name):
            tensors[base_name(name)] = tensor
    return Weights(tensors, weights.notes)


def add_product(base: LazyTensor, up: LazyTensor, down: LazyTensor, scale: float, *, transposed: bool) -> LazyTensor:
    """Returns `base + scale * up down`, or with the product `transposed`."""

    def read(box: Box) -> "torch.Tensor":
        import torch

        rows, columns = reversed(box) if transposed else box
        product = up.read((rows,)).to(torch.float32) @ down.read((slice(None), columns)).to(torch.float32) * scale
        weight = base.read(box).to(torch.float32)
        return (weight + (product.T if transposed else product)).to(base.dtype)

    return LazyTensor(read, base.shape, base.dtype)


def _transposed(model: Any) -> set[str]:
    """Adapted layers whose weight is stored as (in, out), as in GPT-2."""
    modules = model.named_modules()
    return {path for path, module in modules if type(getattr(module, "base_layer", None)).__name__ == "Conv1D"}


def _check_adapters(location: str, model: Any, adapter_tensors: LazyTensors) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items() if is_adapter(name)}
    if differences := shape_differences(expected, {name: tensor.shape for name, tensor in adapter_tensors.items()}):
        raise WorkloadError(
            f"{location} contains other adapters than the model has. {differences} Give {option('lora')} target=... "
            "of these layers"
        )


def write_peft(weights: Weights, architecture: Architecture, target: Path | str, *, base: str | None = None) -> None:
    """Writes only the adapters, in the format of `peft.PeftModel.from_pretrained`.

    Args:
        target: a folder that does not exist, or is empty.
        base: location of the plain model's weights, which peft records.

    Raises:
        WorkloadError: the model has no adapters, or some are missing.
        UsageError: the folder is not empty, or cannot be written.
    """
    from safetensors.torch import save_file

    if not isinstance(architecture, AdaptedArchitecture):
        raise WorkloadError(f"this {architecture.model_type} has no adapters to write; --to hf writes its weights")
    model: Any = without_memory(architecture)
    adapter_tensors = {name: tensor for name, tensor in weights.tensors.items() if is_adapter(name)}
    _check_adapters("what was given", model, adapter_tensors)
    with whole_folder(target) as folder:
        by_peft_name = {
            PREFIX + name.replace(".default.", "."): tensor.read() for name, tensor in adapter_tensors.items()
        }
        save_file(by_peft_name, folder / WEIGHTS, metadata={"format": "pt"})
        settings: Any = model.peft_config["default"]
        settings.base_model_name_or_path, settings.task_type = base, _TASKS.get(architecture.task)
        settings.fan_in_fan_out, settings.inference_mode = bool(_transposed(model)), True
        settings.save_pretrained(folder)
