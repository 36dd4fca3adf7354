"""An optimizer with its state and arithmetic on the CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .parallel.sharding import local

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Steps copies of the weights in host memory with the optimizer that `make` returns for them.

    The host needs memory for a copy of the weights and their gradients in addition to the state; the device no longer
    needs memory for the state. Copies of CUDA tensors are pinned: a step copies all gradients out, waits once, steps,
    and copies all weights in, asynchronously to the device's work. Weights are copied out only if they have changed
    since, as detected by versions and two checksums. `param_groups` and `state` are those of the inner optimizer, so
    schedulers work as usual.

    Args:
        params: all parameters that are updated.
        make: makes the inner optimizer.

    Source: Rajbhandari et al., ZeRO-Offload (2021).
    """

    def __init__(self, params: Iterable[nn.Parameter], make: Make) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        """Host memory for the gradient of each copy."""
        for param in params:
            if not param.requires_grad:
                continue
            # Each rank steps its own shard of FSDP, as a plain tensor: a DTensor on the CPU would
            # still belong to the mesh of the devices.
            shard = local(param.detach())
            host = nn.Parameter(_host_like(shard))
            host.data.copy_(shard, non_blocking=True)
            self.pairs.append((param, host))
        self._record_weights()
        self._wait()
        self.inner = make([host for _, host in self.pairs])
        super().__init__([param for param, _ in self.pairs], {})
        # Learning-rate schedulers change the groups, so both optimizers share them.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step: gradients to the host, the inner optimizer's step, weights to the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = self._changed()
        for param, host in self.pairs:
            host.grad = None if param.grad is None else self._to_host(host, local(param.grad.detach()))
        # One wait for all gradients. The copies of the previous step's weights to the device are then complete, too.
        self._wait()
        device_changes = [pair for pair, is_changed in zip(self.pairs, changed.tolist(), strict=True) if is_changed]
        for param, host in device_changes:
            host.copy_(local(param), non_blocking=True)
        if device_changes:
            self._wait()
        self.inner.step()
        for param, host in self.pairs:
            local(param).copy_(host, non_blocking=True)
        self._record_weights()
        return loss

    def _record_weights(self) -> None:
        """Records the device's weights, which now equal the host's."""
        self._versions = [_version(param) for param, _ in self.pairs]
        self._sums = self._summed()

    def _changed(self) -> torch.Tensor:
        """Returns a mask of the weights that were loaded or changed on the device since `_record_weights`.

        The booleans are in host memory and valid after waiting for the device.
        """
        sums = self._summed()
        versions = [_version(param) != version for (param, _), version in zip(self.pairs, self._versions, strict=True)]
        # Versions detect neither changes of FSDP's shards nor those by `Tensor.data`; the sums do.
        changed = (sums != self._sums).any(-1) | torch.tensor(versions, dtype=torch.bool).to(
            sums.device, non_blocking=True
        )
        return _host_like(changed).copy_(changed, non_blocking=True)

    def _summed(self) -> torch.Tensor:
        """Returns for each parameter the sum of its elements and that of the products of neighbours.

        Shape (parameters, 2), float64, on the device. The products also detect a permutation.
        """
        rows = []
        for param, _ in self.pairs:
            shard = local(param.detach())
            total, products = shard.sum(dtype=torch.float64), shard.new_zeros((), dtype=torch.float64)
            if shard.is_contiguous() and shard.numel() > 1:
                flat = shard.view(-1)
                products = torch.dot(flat[1:], flat[:-1]).double()
            rows.append(torch.stack([total, products]))
        return torch.stack(rows) if rows else torch.empty(0, 2, dtype=torch.float64)

    def _to_host(self, host: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Copies a gradient to host memory, valid after waiting for the device."""
        buffer = self._gradients.get(host)
        if buffer is None or buffer.dtype != gradient.dtype:
            buffer = self._gradients[host] = _host_like(gradient)
        return buffer.copy_(gradient, non_blocking=True)

    def _wait(self) -> None:
        """Waits until all copies between device and host are complete."""
        for device in {local(param).device for param, _ in self.pairs}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's own parameters."""
        for param, host in self.pairs:
            host.grad = None
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates host memory for a tensor, pinned if the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _version(param: nn.Parameter) -> tuple[int, int]:
    """Returns a value that changes when an operation changes a plain parameter, or when it gets other memory."""
    shard = local(param.detach())
    return shard.data_ptr(), shard._version
