"""Fine-tuning by low-rank adapters (LoRA, arXiv:2106.09685)."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..base._transformers import quiet
from ..base.errors import MissingDependency, WorkloadError, unknown
from ..base.option import option
from ..frameworks.common import QUANTIZED_BITS
from ..knobs.meaning import FORMATS
from .architecture import Architecture, one_line
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "r=16, or r=16,alpha=32,target=q_proj+v_proj"
QUANTIZE = {"4bit": 4, "8bit": 8}
"""Bits of a frozen weight, by value of `quantize`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters of a model."""

    r: int
    """Rank."""
    alpha: float | None = None
    """Scale of an adapter's output, times the rank; None for the rank, a scale of 1."""
    target: tuple[str, ...] = ()
    """Names of the adapted linear layers, or `all-linear`; empty for peft's choice for the family."""
    dropout: float = 0.0
    """Dropout before an adapter."""
    quantize: str = ""
    """`4bit` or `8bit`: frozen weights are quantized by bitsandbytes (QLoRA, arXiv:2305.14314); empty for 16 bits."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return (self.alpha or self.r) / self.r

    @property
    def frozen_bits(self) -> float:
        """Bits of a frozen weight, with its scales, while products are in 16 bits."""
        return QUANTIZED_BITS[QUANTIZE[self.quantize]] if self.quantize else 16.0

    @staticmethod
    def parse(text: str) -> "Lora":
        """Parses `r=16[,alpha=32][,target=q_proj+v_proj][,dropout=0.05][,quantize=4bit]`.

        Raises:
            WorkloadError: the text is malformed, or a number is out of range.
        """
        settings: dict[str, str] = {}
        names = [field.name for field in fields(Lora)]
        for pair in text.split(","):
            name, equals, value = (word.strip() for word in pair.partition("="))
            if not equals or not value:
                raise WorkloadError(f"lora must look like {EXAMPLE}, but got '{text}'")
            if name not in names:
                raise WorkloadError(unknown("part of lora", name, names))
            if name in settings:
                raise WorkloadError(f"lora names {name} twice: '{text}'")
            settings[name] = value
        try:
            lora = Lora(
                r=int(settings.get("r", "")),
                alpha=float(settings["alpha"]) if "alpha" in settings else None,
                target=tuple(settings["target"].split("+")) if "target" in settings else (),
                dropout=float(settings.get("dropout", 0)),
                quantize=settings.get("quantize", ""),
            )
        except ValueError:
            raise WorkloadError(f"lora must look like {EXAMPLE}, but got '{text}'") from None
        if lora.r < 1 or (lora.alpha is not None and not lora.alpha > 0) or not 0 <= lora.dropout < 1:
            raise WorkloadError(
                f"lora needs r of at least 1, alpha above 0 and dropout from 0 to below 1, but got '{text}'"
            )
        if lora.quantize not in ("", *QUANTIZE):
            raise WorkloadError(unknown("quantize", lora.quantize, QUANTIZE))
        return lora

    def __str__(self) -> str:
        settings = [f"r={self.r}"]
        settings += [f"alpha={self.alpha:g}"] if self.alpha is not None else []
        settings += [f"target={'+'.join(self.target)}"] if self.target else []
        settings += [f"dropout={self.dropout:g}"] if self.dropout else []
        settings += [f"quantize={self.quantize}"] if self.quantize else []
        return ",".join(settings)


@dataclass(frozen=True, kw_only=True)
class AdaptedArchitecture(Architecture):
    """A Hugging Face architecture with adapters; all other weights are frozen."""

    lora: Lora

    def __call__(self, config: Mapping[str, Any]) -> "nn.Module":
        """Returns the module like `Architecture`, including names of modules: an adapted layer contains the original
        as `base_layer`.

        Raises:
            WorkloadError: no layer matches `target`, or peft has no choice for the family.
        """
        from ..base._torch import unset_fake_temporarily

        try:
            import peft
        except ImportError as error:
            raise MissingDependency(f"{option('lora')} needs peft: `pip install peft`") from error
        model: Any = super().__call__(config)
        lora = self.lora
        target: Any = list(lora.target) or None
        if lora.target == ("all-linear",):
            target = "all-linear"
            if any(parameter.dim() == 3 for parameter in model.parameters()):
                # peft adds fused experts and their router, which are not linear layers.
                head = model.get_output_embeddings()
                target = [path for path, module in model.named_modules() if _linear(module) and module is not head]
        alpha = lora.alpha or lora.r
        settings = peft.LoraConfig(
            r=lora.r,
            lora_alpha=alpha if alpha % 1 else int(alpha),
            target_modules=target,
            lora_dropout=lora.dropout,
        )
        try:
            with quiet(), warnings.catch_warnings(), unset_fake_temporarily():
                # peft warns that GPT-2's layers are transposed, which it handles itself, and of experts without adapters.
                warnings.simplefilter("ignore", UserWarning)
                warnings.simplefilter("ignore", RuntimeWarning)
                model = peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
        except ValueError as error:
            names = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if _linear(module)})
            raise WorkloadError(
                f"lora cannot adapt this {self.model_type}: {one_line(error)}; its linear "
                f"layers are called {', '.join(names)}: give target=..."
            ) from error
        _materialise(model)
        return model

    @property
    def imports(self) -> tuple[str, ...]:
        return (*super().imports, "peft")


def check_lora(text: str, name: str) -> None:
    """Raises WorkloadError if a text is not a `Lora`; the check of an option."""
    Lora.parse(text)


def lora_of(workload: Workload) -> Lora | None:
    """Adapters of a workload's model; None for a model that is trained as a whole, or by a user's code."""
    return workload.model.lora if isinstance(workload.model, AdaptedArchitecture) else None


def frozen_format(workload: Workload, precision: str) -> str | None:
    """Format of the frozen weights beside adapters, `bf16` or `fp16`: that of products under autocast. They are not updated, so
    they need no float32 copy. None for the format of other weights."""
    return FORMATS[precision].autocast if lora_of(workload) is not None else None


def with_lora(workload: Workload, lora: Lora) -> Workload:
    """Returns the workload that trains only adapters of a Hugging Face model. Its space is the same; it has another
    id.

    Raises:
        MissingDependency: peft is not installed.
        WorkloadError: it is not a Hugging Face model, or no layer matches `target`.
    """
    model = workload.model
    if not isinstance(model, Architecture):
        raise WorkloadError(
            f"lora adapts Hugging Face models; '{workload.name}' is built by your own code, which can add "
            "adapters itself"
        )
    base_fields = {field.name: getattr(model, field.name) for field in fields(model)}
    adapted = AdaptedArchitecture(**base_fields, lora=lora)
    result = replace(workload, model=adapted, identity={**(workload.identity or {}), "lora": str(lora)})
    import torch

    with torch.device("meta"):
        result.build_model({})
    return result


def _materialise(model: "nn.Module") -> None:
    """Moves adapters, which are made on the meta device, to the device of their layers, initialised.

    peft's own way of moving them fails if a model is traced with fake tensors.
    """
    import torch
    from torch import nn

    for path, layer in list(model.named_modules()):
        if not hasattr(layer, "base_layer"):
            continue
        if not _linear(layer.base_layer):
            raise WorkloadError(
                f"lora adapts linear layers, but target {path.rpartition('.')[2]} is of type "
                f"{type(layer.base_layer).__name__}"
            )
        weight = layer.base_layer.weight
        for adapter in (*layer.lora_A.values(), *layer.lora_B.values()):
            adapter.weight = nn.Parameter(torch.empty_like(adapter.weight, device=weight.device, dtype=weight.dtype))
        initialise_adapter(layer)


def initialise_adapter(module: "nn.Module") -> bool:
    """Initialises the adapter of a layer as peft does; returns False for a module without one. A rule for `build(init=...)`."""
    from torch import nn

    if not hasattr(module, "lora_A"):
        return False
    for adapter in module.lora_A.values():
        adapter.reset_parameters()
    for adapter in module.lora_B.values():
        nn.init.zeros_(adapter.weight)
    return True


def _linear(module: "nn.Module") -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
