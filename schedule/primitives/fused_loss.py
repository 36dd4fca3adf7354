"""fused_loss: cross-entropy from hidden states, without the logits of a micro-batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError
from ..forward import Layer, add_layer, layers_of
from ..fused_logits import FusedLogits, Product
from ..graph.called import check_called
from ..parallel.exchange import syncs_of
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def fused_loss(sch: ScheduledModule) -> None:
    """Leaves this module's logits unformed and computes their cross-entropy from its input, chunk by chunk.

    For a language-model head, an `nn.Linear`, whole or cut over the vocabulary with `parallel_loss`. The
    model's own loss code need not know: `torch.nn.functional.cross_entropy` of these logits forms those of
    a few tokens at a time, and in the same pass the gradients. Any other use of them forms the logits as
    usual.

    Raises:
        ScheduleError: the module is no `nn.Linear`; its loss is fused already; ranks exchange its output.
    """
    label, module = f"fused_loss on '{sch.name}'", sch.module
    if type(module) is not nn.Linear:
        raise ScheduleError(f"{label}: the head must be an nn.Linear, but is a {type(module).__name__}")
    if layers_of(module, FusedLoss):
        raise ScheduleError(f"{label}: the loss of a head is fused once, and it already is")
    if any(each.mode in ("fwd_post", "bwd_pre") for each in syncs_of(module)):
        raise ScheduleError(f"{label}: ranks exchange its logits, which forms them; use parallel_loss")
    check_called(sch, "fused_loss")
    add_layer(module, FusedLoss())


def formed_for(module: nn.Module) -> dict[str, bool]:
    """The functions that took the logits of a head with `fused_loss`: whether these were formed for it."""
    return layers_of(module, FusedLoss)[0].formed_for


class FusedLoss(Layer):
    """Gives logits that are not formed."""

    order = 20
    alters = True

    def __init__(self) -> None:
        self.formed_for: dict[str, bool] = {}
        """Functions that took logits, by name: whether these were formed for it."""

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden = args[0] if args else kwargs["input"]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        if dtype == torch.float16:
            raise ScheduleError(
                "fused_loss: gradients are formed before the loss is scaled, as float16 needs it; use bf16"
            )
        product = Product(module.weight, module.bias, dtype, None, module.weight.shape[0], self.formed_for)
        return FusedLogits.of(hidden, product)
