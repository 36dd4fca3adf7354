"""An optimizer whose state and arithmetic are on the CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .parallel.sharding import local

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Steps copies of the weights in host memory with the optimizer that `make` returns for them.

    Costs the host one copy of the weights and their gradients besides the state; frees the device of the
    state. `param_groups` and `state` are those of the inner optimizer, so schedulers work as usual.

    Source: Rajbhandari et al., ZeRO-Offload (2021).
    """

    def __init__(self, params: Iterable[nn.Parameter], make: Make) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for param in params:
            if not param.requires_grad:
                continue
            # Of what FSDP cuts each rank steps its own piece, as a plain tensor: a DTensor on the CPU would
            # still belong to the mesh of the devices.
            host = nn.Parameter(local(param.detach()).to("cpu", copy=True))
            self.pairs.append((param, host))
        self.inner = make([host for _, host in self.pairs])
        super().__init__([param for param, _ in self.pairs], {})
        # Schedulers change the groups: they are the inner optimizer's own.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: gradients to the host, the inner optimizer's step, weights to the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, host in self.pairs:
            # Weights may have been loaded or changed on the device since the last step.
            host.copy_(local(param))
            host.grad = None if param.grad is None else local(param.grad.detach()).to("cpu", copy=True)
        self.inner.step()
        for param, host in self.pairs:
            local(param).copy_(host)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's own parameters."""
        for param, host in self.pairs:
            host.grad = None
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
