"""The knob `precision`: autocast, 8-bit products, gradient scaling."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError, not_installed, unknown
from ..knobs.meaning import FORMATS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..schedule import Schedule


def dtype_of(name: str) -> "torch.dtype":
    """PyTorch's name of a number format: `fp32`, `bf16` or `fp16`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


class Precision:
    """The number formats of a training step.

    Args:
        name: the knob's value.
        ranks: ranks that take a step together; with float16 they must agree on skipping it.

    Raises:
        WorkloadError: the device does not support the format, or torchao is missing.
    """

    pure: bool
    """True if the weights are in this format too."""

    def __init__(self, name: str, device: "torch.device", ranks: int = 1) -> None:
        import torch

        supported = [precision for precision in FORMATS if precision not in ("fp16", "tf32") or device.type == "cuda"]
        if name not in supported:
            raise WorkloadError(f"{unknown('precision', name, supported)} These work on {device.type}.")
        formats = FORMATS[name]
        self.float8 = formats.scaling
        """Granularity of the scales of 8-bit numbers; None without 8-bit products."""
        if self.float8 and (reason := not_installed("torchao", "fp8")):
            raise WorkloadError(f"precision={name}: {reason}")
        self.pure = formats.weights == "bf16"
        self.scaled = formats.autocast == "fp16"
        """True if the loss is scaled, as float16 requires."""
        self._tf32 = formats.compute == "tf32"
        self._name, self._device = name, device
        self._dtype = dtype_of(formats.autocast) if formats.autocast else None
        self._fixed: float | None = None
        self._scaler: torch.amp.GradScaler | None = None
        if self.scaled and ranks > 1:
            # A rank that alone sees an infinity (in its piece of a layer, its shard of the gradients) would
            # alone skip the step: this one takes the maximum over all ranks.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._scaler = ShardedGradScaler(device.type)
        elif self.scaled:
            self._scaler = torch.amp.GradScaler(device.type)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of the forward pass."""
        import torch

        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Context of the forward and backward passes: float32 products use TensorFloat-32 if the knob requests it.

        The switch applies to the whole process and is restored at the end.
        """
        import torch

        # If a program has set `fp32_precision`, reading the older switch raises; the newer one reflects both.
        if not self._tf32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
            yield
            return
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")

    def convert(self, blocks: "Sequence[Schedule]") -> None:
        """Converts linear layers of repeated blocks to 8-bit products, if requested; a CPU emulates them.

        Raises:
            WorkloadError: no layer can be converted.
        """
        if not self.float8:
            return
        from ..models.families.standard import unconvertible
        from ..schedule.primitives.formats import convertible

        if reason := unconvertible(block.module for block in blocks):
            raise WorkloadError(f"precision={self._name}: {reason}")
        for block in blocks:
            if convertible(block.module):
                block.float8(self.float8, emulate=self._device.type != "cuda")

    def roundoff(self, model: "nn.Module") -> float:
        """Unit roundoff of the products in a model: half the distance from 1 to the next number."""
        import torch

        from ..base._torch import ConvNd

        if self.float8:
            # Gradients may be in e5m2, but the other factors of their products are not.
            return torch.finfo(torch.float8_e4m3fn).eps / 2
        if self._dtype is not None or self.pure:
            return torch.finfo(self._dtype or torch.bfloat16).eps / 2
        if self._tf32:
            return torch.finfo(torch.float16).eps / 2
        if self._device.type == "cuda":
            # Products of float32 may use TensorFloat-32, which has as many bits as float16.
            # `allow_tf32` raises if a program has set `fp32_precision`, which reflects both settings.
            convolves = any(isinstance(module, ConvNd) for module in model.modules())
            products = [torch.backends.cuda.matmul, *([torch.backends.cudnn.conv] if convolves else [])]
            if any(backend.fp32_precision == "tf32" for backend in products):
                return torch.finfo(torch.float16).eps / 2
        return torch.finfo(torch.float32).eps / 2

    def scale(self, loss: "torch.Tensor") -> "torch.Tensor":
        """Scales the loss so that its gradients are representable."""
        if self._fixed is not None:
            return loss * self._fixed
        return self._scaler.scale(loss) if self._scaler is not None else loss

    @contextlib.contextmanager
    def scaling(self, factor: float | None) -> Iterator[None]:
        """Scales the loss by this factor instead of the current one; None changes nothing."""
        self._fixed = factor
        try:
            yield
        finally:
            self._fixed = None

    @property
    def loss_scale(self) -> float:
        """Current scale of the loss; it decreases after a skipped step."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def unscale(self, optimizer: "torch.optim.Optimizer") -> None:
        """Removes the scale of the loss from the gradients; called before every `step`."""
        # Unless gradients are unscaled before, fused optimizers would check only their own rank's gradients.
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: "torch.optim.Optimizer") -> None:
        """Runs the optimizer's step; all ranks skip it if a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        self._scaler.update()

    @property
    def facts(self) -> dict[str, float]:
        """State that a checkpoint keeps: the scale, and the steps since it changed, after which it grows."""
        growth = 0 if self._scaler is None else int(self._scaler.state_dict().get("_growth_tracker", 0))
        return {"loss_scale": self.loss_scale, "loss_scale_steps": growth}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues with the `facts` of a checkpoint."""
        if self._scaler is not None:  # before its first step it has no scale to update
            state = {
                "scale": float(facts.get("loss_scale", 1.0)),
                "_growth_tracker": int(facts.get("loss_scale_steps", 0)),
            }
            self._scaler.load_state_dict({**self._scaler.state_dict(), **state})
