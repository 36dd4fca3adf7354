"""Low-rank adapters in peft's format: reads, writes, and merges them into the adapted weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import WorkloadError
from ...base.reading import Malformed, parse_json, read_named
from ..architecture import Architecture, without_memory
from ..lora import AdaptedArchitecture, Lora
from .folder import whole_folder
from .lazy import LazyTensor, Merged
from .safetensors_files import stored_tensors
from .weights import Weights, shape_differences

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
                f"'{adapters}' contains adapters, but this {architecture.model_type} is trained without; give --lora r=..., "
                "or merge them first: redline convert --merge"
            )
        return weights
    state = without_memory(architecture).state_dict()
    tensors: dict[str, LazyTensor] = {}
    adapter_tensors = {} if adapters is None else read_adapters(adapters, architecture)
    for name, tensor in state.items():
        if is_adapter(name):
            if adapters is None:
                continue
            if name not in adapter_tensors or adapter_tensors[name].shape != tensor.shape:
                raise WorkloadError(_other_adapters(adapters, state, adapter_tensors))
            tensors[name] = adapter_tensors[name]
        elif (base := base_name(name)) in weights.tensors:
            tensors[name] = weights.tensors[base]
    if len(adapter_tensors) > sum(is_adapter(name) for name in tensors):
        raise WorkloadError(_other_adapters(adapters, state, adapter_tensors))
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
    lora = architecture.lora
    scale = settings.get("lora_alpha", 0) / max(1, settings.get("r", 0))
    if settings.get("r") != lora.r or scale != scaling(architecture):
        raise WorkloadError(
            f"'{folder}' contains adapters of r={settings.get('r')}, alpha={settings.get('lora_alpha')}, and the model has "
            f"r={lora.r}, alpha={_alpha(lora)}: give --lora "
            f"r={settings.get('r')},alpha={settings.get('lora_alpha')}"
        )
    stored = stored_tensors(folder / WEIGHTS)
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
        document = parse_json(read_named(folder / CONFIG, at_most=1 << 20))
    except (OSError, Malformed) as error:
        raise WorkloadError(f"'{folder}' is not a folder of adapters: {CONFIG}: {error}") from error
    if not isinstance(document, dict):
        raise WorkloadError(f"'{folder / CONFIG}' must contain a mapping")
    return document


def scaling(architecture: AdaptedArchitecture) -> float:
    """Factor of an adapter's product."""
    return _alpha(architecture.lora) / architecture.lora.r


def _alpha(lora: Lora) -> float:
    alpha = lora.r if lora.alpha is None else lora.alpha
    return int(alpha) if alpha == int(alpha) else alpha


def merged(weights: Weights, architecture: AdaptedArchitecture) -> Weights:
    """Returns the weights of the plain model with each adapter added to its layer, `W + alpha / r * B A`.

    The sum is computed in float32 and rounded to the dtype of the weights.

    Raises:
        WorkloadError: an adapter is missing.
    """
    tensors = weights.tensors
    transposed, scale = _transposed(architecture), scaling(architecture)
    tensors_merged: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        layer = name.removesuffix(".base_layer.weight")
        if layer == name:
            tensors_merged[base_name(name)] = tensor
            continue
        missing = [factor for factor in ("A", "B") if f"{layer}.lora_{factor}.default.weight" not in tensors]
        if missing:
            raise WorkloadError(f"the adapter {layer}.lora_{missing[0]} is missing, so nothing can be merged")
        up, down = (tensors[f"{layer}.lora_{factor}.default.weight"] for factor in ("B", "A"))
        tensors_merged[base_name(name)] = Merged(tensor, up=up, down=down, scale=scale, transposed=layer in transposed)
    return Weights(tensors_merged, weights.notes)


def _transposed(architecture: AdaptedArchitecture) -> set[str]:
    """Adapted layers whose weight is stored as (in, out), as in GPT-2."""
    modules = without_memory(architecture).named_modules()
    return {path for path, module in modules if type(getattr(module, "base_layer", None)).__name__ == "Conv1D"}


def _other_adapters(
    folder: Path | str | None, state: Mapping[str, Any], adapter_tensors: Mapping[str, LazyTensor]
) -> str:
    expected = {name: tensor.shape for name, tensor in state.items() if is_adapter(name)}
    differences = shape_differences(expected, {name: tensor.shape for name, tensor in adapter_tensors.items()})
    return (
        f"'{folder}' contains other adapters than the model has. {differences} Give --lora target=... of these layers"
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
    tensors = weights.tensors
    model = without_memory(architecture)
    state = model.state_dict()
    adapter_tensors = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    if {name: tensor.shape for name, tensor in state.items() if is_adapter(name)} != {
        name: tensor.shape for name, tensor in adapter_tensors.items()
    }:
        raise WorkloadError(_other_adapters("what was given", state, adapter_tensors))
    with whole_folder(target) as folder:
        by_peft_name = {
            PREFIX + name.replace(".default.", "."): tensor.read() for name, tensor in adapter_tensors.items()
        }
        save_file(by_peft_name, folder / WEIGHTS, metadata={"format": "pt"})
        settings = peft_settings(architecture, model)
        settings.base_model_name_or_path = base
        settings.save_pretrained(folder)


def peft_settings(architecture: AdaptedArchitecture, model: Any) -> Any:
    """Returns a `peft.LoraConfig` that gives the plain model the same adapters."""
    import peft

    lora = architecture.lora
    paths = [path for path, module in model.named_modules() if hasattr(module, "base_layer")]
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=_alpha(lora),
        # Each layer by its last name if no other layer has that name, otherwise by its path.
        target_modules=_targets(paths, model),
        lora_dropout=lora.dropout,
        task_type=_TASKS.get(architecture.task),
        fan_in_fan_out=bool(_transposed(architecture)),
        inference_mode=True,
    )


def _targets(paths: list[str], model: Any) -> list[str]:
    names = sorted({path.rpartition(".")[2] for path in paths})
    same_name = [
        path for path, module in model.named_modules() if path.rpartition(".")[2] in names and hasattr(module, "weight")
    ]
    return names if sorted(same_name) == sorted(paths) else sorted(paths)
