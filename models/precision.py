"""The knob `precision`: autocast and gradient scaling."""

import contextlib
from typing import TYPE_CHECKING, Any

from ..errors import WorkloadError, unknown

if TYPE_CHECKING:
    import torch

LOSSY = ("bf16_pure", "fp8")
"""Values of the knob that are another training than float32's: without fp32 master weights small updates are
lost, and products in eight bits round what they multiply. Autocast (`bf16`, `fp16`) keeps both."""


class Precision:
    """The number formats of a training step.

    Args:
        name: the knob's value.
        device: where.
        ranks: ranks that take a step together; with float16 they must agree on whether to skip it.

    Raises:
        WorkloadError: the device has no such format.
    """

    pure: bool
    """Whether the weights are in it too."""

    def __init__(self, name: str, device: "torch.device", ranks: int = 1) -> None:
        import torch

        known = {"fp32": None, "bf16": torch.bfloat16, "bf16_pure": None}
        if device.type == "cuda":
            known["fp16"] = torch.float16
        if name not in known:
            raise WorkloadError(f"{unknown('precision', name, known)} These work on {device.type}.")
        self.pure = name == "bf16_pure"
        self.scaled = name == "fp16"
        """Whether the loss is scaled, as float16 needs it."""
        self._device = device
        self._dtype = known[name]
        self._scaler: Any = None
        if self.scaled and ranks > 1:
            # A rank that alone sees an infinity (in its piece of a layer, its shard of the gradients) would
            # alone skip the step: this one takes the maximum over all ranks.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._scaler = ShardedGradScaler(device.type)
        elif self.scaled:
            self._scaler = torch.amp.GradScaler(device.type)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For the forward pass."""
        import torch

        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def scale(self, loss: "torch.Tensor") -> "torch.Tensor":
        """The loss whose gradients are representable."""
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def step(self, optimizer: "torch.optim.Optimizer") -> None:
        """The optimizer's step; skipped by all ranks where a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
            return
        # Fused optimizers would look at their own rank's gradients only, unless these are unscaled before.
        self._scaler.unscale_(optimizer)
        self._scaler.step(optimizer)
        self._scaler.update()
