"""An optimizer with its state and arithmetic on the CPU."""

from collections.abc import Callable, Collection, Iterable
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
        chosen: those whose state is in host memory; None for all. The inner optimizer steps the others in place.

    Source: Rajbhandari et al., ZeRO-Offload (2021).
    """

    def __init__(
        self, params: Iterable[nn.Parameter], make: Make, chosen: Collection[nn.Parameter] | None = None
    ) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        stepped: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        """Host memory for the gradient of each copy."""
        for param in params:
            if not param.requires_grad:
                continue
            if chosen is not None and param not in chosen:
                self._others.append(param)
                stepped.append(param)
                continue
            # Each rank steps its own shard of FSDP, as a plain tensor: a DTensor on the CPU would
            # still belong to the mesh of the devices.
            here = local(param.detach())
            host = nn.Parameter(_room_for(here))
            host.data.copy_(here, non_blocking=True)
            self.pairs.append((param, host))
            stepped.append(host)
        self._remember()
        self._wait()
        self.inner = make(stepped)
        super().__init__([*(param for param, _ in self.pairs), *self._others], {})
        # Schedulers change the groups: they are the inner optimizer's own.
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
            host.grad = None if param.grad is None else self._moved(host, local(param.grad.detach()))
        # By then the copies of the previous step's weights are also complete.
        self._wait()
        late = [pair for pair, other in zip(self.pairs, changed.tolist(), strict=True) if other]
        for param, host in late:
            host.copy_(local(param), non_blocking=True)
        if late:
            self._wait()
        self.inner.step()
        for param, host in self.pairs:
            local(param).copy_(host, non_blocking=True)
        self._remember()
        return loss

    def _remember(self) -> None:
        """Records the device's weights, which now equal the host's."""
        self._versions = [_version(param) for param, _ in self.pairs]
        self._sums = self._summed()

    def _changed(self) -> torch.Tensor:
        """Mask of weights that were loaded or changed on the device since: booleans in host memory, valid after
        waiting for the device.
        """
        sums = self._summed()
        versions = [_version(param) != seen for (param, _), seen in zip(self.pairs, self._versions, strict=True)]
        # FSDP's shards have no version; changes by `Tensor.data` do not count either.
        changed = (sums != self._sums).any(-1) | torch.tensor(versions, dtype=torch.bool).to(
            sums.device, non_blocking=True
        )
        return _room_for(changed).copy_(changed, non_blocking=True)

    def _summed(self) -> torch.Tensor:
        """For each parameter the sum of its elements and that of the products of neighbours, on the device: (n, 2),
        float64.
        """
        rows = []
        for param, _ in self.pairs:
            here = local(param.detach())
            total, products = here.sum(dtype=torch.float64), here.new_zeros((), dtype=torch.float64)
            if here.is_contiguous() and here.numel() > 1:
                flat = here.view(-1)
                products = torch.dot(flat[1:], flat[:-1]).double()
            rows.append(torch.stack([total, products]))
        return torch.stack(rows) if rows else torch.empty(0, 2, dtype=torch.float64)

    def _moved(self, host: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in host memory, valid after waiting for the device."""
        room = self._gradients.get(host)
        if room is None or room.dtype != gradient.dtype:
            room = self._gradients[host] = _room_for(gradient)
        return room.copy_(gradient, non_blocking=True)

    def _wait(self) -> None:
        """Waits until all copies are complete."""
        for device in {local(param).device for param, _ in self.pairs}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's own parameters."""
        for _, host in self.pairs:
            host.grad = None
        for param in (*(param for param, _ in self.pairs), *self._others):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor, pinned if the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _version(param: nn.Parameter) -> tuple[int, int]:
    """A value that changes when an operation changes a plain parameter, or when it gets other memory."""
    here = local(param.detach())
    return here.data_ptr(), here._version
