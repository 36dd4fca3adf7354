"""Low-rank adapters as peft keeps them: read, written, and merged into the weights they adapt."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import WorkloadError
from ...base.reading import Malformed, parse_json, read_named
from ..architecture import Architecture, without_memory
from ..lora import AdaptedArchitecture, Lora
from .folder import whole_folder
from .lazy import Added, LazyTensor, Merged
from .safetensors_files import stored_tensors
from .weights import LazyWeights, Weights, differences, lazy_tensors, unlike

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft's names begin with: its own two modules around the model."""
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""What peft calls tasks; it has no word for the others."""
_ADAPTER = re.compile(r"\.(lora_[AB])\.default\.")


def with_adapters(weights: LazyWeights, architecture: Architecture, adapters: Path | None) -> Weights:
    """The weights of a plain model, by the names of the same model with adapters.

    Args:
        weights: those of the plain model.
        architecture: with adapters, or without; then the weights are given back as they are.
        adapters: peft's folder; None leaves them as they are initialised.

    Raises:
        WorkloadError: the folder holds adapters of another kind, rank or of other layers; or the model has none.
    """
    if not isinstance(architecture, AdaptedArchitecture):
        if adapters is not None:
            raise WorkloadError(
                f"'{adapters}' holds adapters, and this {architecture.model_type} is trained without; give --lora r=..., "
                "or merge them first: redline convert --merge"
            )
        return weights
    own = without_memory(architecture).state_dict()
    tensors: dict[str, LazyTensor] = {}
    given = {} if adapters is None else read_adapters(adapters, architecture)
    for name, each in own.items():
        if is_adapter(name):
            if adapters is None:
                continue
            if name not in given or given[name].shape != each.shape:
                raise WorkloadError(_other_adapters(adapters, own, given))
            tensors[name] = given[name]
        elif (base := base_name(name)) in weights.tensors:
            tensors[name] = weights.tensors[base]
    if len(given) > sum(is_adapter(name) for name in tensors):
        raise WorkloadError(_other_adapters(adapters, own, given))
    return LazyWeights(tensors, weights.notes)


def is_adapter(name: str) -> bool:
    """Whether a model with adapters means one of them by a name."""
    return _ADAPTER.search(name) is not None


def base_name(name: str) -> str:
    """The name that a tensor of an adapted layer has in the plain model."""
    return name.replace(".base_layer.", ".")


def read_adapters(folder: Path, architecture: AdaptedArchitecture) -> dict[str, LazyTensor]:
    """The adapters in peft's folder, by the model's names.

    Raises:
        WorkloadError: it is no such folder, or its adapters are of another kind, or scaled otherwise than the model's.
    """
    settings = adapter_settings(folder)
    kind = settings.get("peft_type")
    extra = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if settings.get(key)]
    if kind != "LORA" or extra or settings.get("bias", "none") != "none":
        what = extra[0] if extra else f"bias={settings.get('bias')}" if kind == "LORA" else f"peft_type {kind}"
        raise WorkloadError(f"'{folder}' holds adapters with {what}; redline trains plain LoRA, without biases")
    lora = architecture.lora
    scale = settings.get("lora_alpha", 0) / max(1, settings.get("r", 0))
    if settings.get("r") != lora.r or scale != scaling(architecture):
        raise WorkloadError(
            f"'{folder}' holds adapters of r={settings.get('r')}, alpha={settings.get('lora_alpha')}, and the model has "
            f"r={lora.r}, alpha={_alpha(lora)}: give --lora "
            f"r={settings.get('r')},alpha={settings.get('lora_alpha')}"
        )
    stored = stored_tensors(folder / WEIGHTS)
    return {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(PREFIX)): each for name, each in stored.items()
    }


def adapter_settings(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says.

    Raises:
        WorkloadError: there is none that can be read.
    """
    try:
        document = parse_json(read_named(folder / CONFIG, at_most=1 << 20))
    except (OSError, Malformed) as error:
        raise WorkloadError(f"'{folder}' is no folder of adapters: {CONFIG}: {error}") from error
    if not isinstance(document, dict):
        raise WorkloadError(f"'{folder / CONFIG}' should hold a mapping")
    return document


def scaling(architecture: AdaptedArchitecture) -> float:
    """By what an adapter's product is multiplied."""
    return _alpha(architecture.lora) / architecture.lora.r


def _alpha(lora: Lora) -> float:
    alpha = lora.r if lora.alpha is None else lora.alpha
    return int(alpha) if alpha == int(alpha) else alpha


def merged(weights: Weights, architecture: AdaptedArchitecture) -> Weights:
    """The weights of the plain model with each adapter added to its layer, `W + alpha / r * B A`.

    The sum is computed in float32 and rounded to the dtype of the weights.

    Raises:
        WorkloadError: an adapter is not there.
    """
    tensors = lazy_tensors(weights)
    transposed = _transposed(architecture)
    out: dict[str, LazyTensor] = {}
    for name, each in tensors.items():
        if is_adapter(name):
            continue
        layer = name.removesuffix(".base_layer.weight")
        if layer == name:
            out[base_name(name)] = each
            continue
        absent = [part for part in ("A", "B") if f"{layer}.lora_{part}.default.weight" not in tensors]
        if absent:
            raise WorkloadError(f"the adapter {layer}.lora_{absent[0]} is not there, so that nothing can be merged")
        up, down = (tensors[f"{layer}.lora_{part}.default.weight"] for part in ("B", "A"))
        added = Added(up=up, down=down, scale=scaling(architecture), transposed=layer in transposed)
        out[base_name(name)] = Merged(each, added)
    return LazyWeights(out, weights.notes)


def _transposed(architecture: AdaptedArchitecture) -> set[str]:
    """Adapted layers whose weight is stored as (in, out): GPT-2's."""
    modules = without_memory(architecture).named_modules()
    return {path for path, each in modules if type(getattr(each, "base_layer", None)).__name__ == "Conv1D"}


def _other_adapters(folder: Path | str | None, own: Mapping[str, Any], given: Mapping[str, LazyTensor]) -> str:
    mine = {name: tuple(each.shape) for name, each in own.items() if is_adapter(name)}
    missing = [name for name in mine if name not in given]
    left = [name for name in given if name not in mine]
    wrong = [
        unlike(name, each.shape, mine[name])
        for name, each in given.items()
        if name in mine and tuple(each.shape) != mine[name]
    ]
    what = differences(missing, left, wrong)
    return f"'{folder}' holds other adapters than the model has. {what} Give --lora target=... of these layers"


def write_peft(weights: Weights, architecture: Architecture, out: Path | str, *, base: str | None = None) -> None:
    """Writes the adapters alone, as `peft.PeftModel.from_pretrained` loads them.

    Args:
        weights: of a model with adapters.
        architecture: that model.
        out: a folder that is not there yet, or empty.
        base: where the plain model's weights lie, which peft notes.

    Raises:
        WorkloadError: the model has no adapters, or these are not all there.
        UsageError: the folder holds something, or cannot be written.
    """
    from safetensors.torch import save_file

    if not isinstance(architecture, AdaptedArchitecture):
        raise WorkloadError(f"this {architecture.model_type} has no adapters to write; --to hf writes its weights")
    tensors = lazy_tensors(weights)
    model = without_memory(architecture)
    own = model.state_dict()
    given = {name: each for name, each in tensors.items() if is_adapter(name)}
    if {name: each.shape for name, each in own.items() if is_adapter(name)} != {
        n: each.shape for n, each in given.items()
    }:
        raise WorkloadError(_other_adapters("what was given", own, given))
    with whole_folder(out) as folder:
        named = {PREFIX + name.replace(".default.", "."): each.read() for name, each in given.items()}
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        settings = peft_settings(architecture, model)
        settings.base_model_name_or_path = base
        settings.save_pretrained(folder)


def peft_settings(architecture: AdaptedArchitecture, model: Any) -> Any:
    """A `peft.LoraConfig` that gives the plain model the same adapters."""
    import peft

    lora = architecture.lora
    paths = [path for path, each in model.named_modules() if hasattr(each, "base_layer")]
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=_alpha(lora),
        # Each layer by its last name, where no other layer has that name; else by its path.
        target_modules=_targets(paths, model),
        lora_dropout=lora.dropout,
        task_type=_TASKS.get(architecture.task),
        fan_in_fan_out=bool(_transposed(architecture)),
        inference_mode=True,
    )


def _targets(paths: list[str], model: Any) -> list[str]:
    names = sorted({path.rpartition(".")[2] for path in paths})
    alike = [
        path for path, each in model.named_modules() if path.rpartition(".")[2] in names and hasattr(each, "weight")
    ]
    return names if sorted(alike) == sorted(paths) else sorted(paths)
