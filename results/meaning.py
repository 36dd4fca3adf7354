"""What a configuration means: in which formats it computes, and what its replicas exchange, when and how.

Stated once. Training is built from it (`models/training.py`), time and memory are estimated from it
(`runners/estimate`), and exports say it in the words of other frameworks (`results/export`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BUCKET_MIB = 25.0
"""What replicas that are kept whole exchange at once, MiB; the default of torch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a training step: `fp32`, `bf16`, `fp16` or `fp8`."""

    weights: str = "fp32"
    """What the optimizer updates, and its state."""
    compute: str = "fp32"
    """Matrix products."""
    gathered: str = "fp32"
    """In what weights that are cut over replicas (ZeRO 2 and 3) are gathered."""
    gradients: str = "fp32"
    """In what gradients add up."""
    reduced: str = "fp32"
    """In what gradients travel between replicas."""
    scaling: str | None = None
    """What of 8-bit numbers shares a scale: a tensor, or each of its rows (the primitive `float8`)."""

    @property
    def autocast(self) -> str | None:
        """What products are cast to; None where they are computed in the format of the weights. Beside those
        in 8 bits, which the linear layers of repeated blocks have, all others are in bf16."""
        compute = "bf16" if self.compute == "fp8" else self.compute
        return compute if compute != self.weights else None


FORMATS: Mapping[str, Formats] = {
    "fp32": Formats(),
    "bf16": Formats(compute="bf16", gathered="bf16"),
    "fp16": Formats(compute="fp16"),
    "bf16_pure": Formats("bf16", "bf16", "bf16", "bf16", "bf16"),
    "fp8": Formats(compute="fp8", gathered="bf16", scaling="tensorwise"),
    "fp8_rowwise": Formats(compute="fp8", gathered="bf16", scaling="rowwise"),
}
"""By the knob `precision`. With fp16 the loss is scaled, and gradients are unscaled in float32."""

FLOAT8 = tuple(name for name, formats in FORMATS.items() if formats.compute == "fp8")
"""Values of the knob `precision` that compute in 8 bits."""
REDUCED = ("fp32", "bf16")
"""Values of the knob `reduce_dtype`: what gradients of float32 travel in."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What replicas exchange in one optimizer step."""

    cut: tuple[str, ...]
    """What they share among them: of `optimizer`, `gradients` and `weights`."""
    reduced: str
    """When gradients are summed over them: once a `step`, or with every `micro_batch`, since keeping them whole
    until the last would take the memory that cutting them is there to save."""
    gathered: str
    """When weights are collected: `never`; behind the `update`, each from its owner; in the forward pass, for
    the whole `step`; or for every `pass`, forward and backward."""


EXCHANGES: tuple[Exchange, ...] = (
    Exchange((), "step", "never"),
    Exchange(("optimizer",), "step", "update"),
    Exchange(("optimizer", "gradients"), "micro_batch", "step"),
    Exchange(("optimizer", "gradients", "weights"), "micro_batch", "pass"),
)
"""By the knob `zero`. Source: Rajbhandari et al., ZeRO (2020)."""


def formats_of(config: Mapping[str, Any]) -> Formats:
    """The formats of a configuration, by its knobs `precision` and `reduce_dtype`.

    Raises:
        KeyError: there is no such precision.
    """
    found = FORMATS[str(config.get("precision", "fp32"))]
    narrow = config.get("reduce_dtype", "fp32") == "bf16"
    return replace(found, reduced="bf16") if narrow else found
