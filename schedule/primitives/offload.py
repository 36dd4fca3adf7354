"""offload: keep activations or optimizer state in host memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError, unknown
from ..forward import Layer, add_layer
from ..graph.called import check_called
from ..offloaded import OffloadedOptimizer
from ..primitive import primitive
from ..tree import ScheduledModule

WHAT = ("activations", "optimizer")


@primitive
def offload(sch: ScheduledModule, what: str = "activations") -> None:
    """Keeps in host memory what need not lie on the device between its uses.

    Args:
        what: `activations`: what this module saves for the backward pass is copied out in the forward and
            back in the backward. `optimizer` (on the root): the optimizer's state and step are on the CPU, on
            copies of the weights; each step moves the gradients out and the weights in.

    Raises:
        ScheduleError: neither of these; `optimizer` elsewhere than on the root; called before.
    """
    label = f"offload on '{sch.name}'"
    if what not in WHAT:
        raise ScheduleError(f"{label}: {unknown('what', what, WHAT)}")
    if what == "optimizer" and sch.path:
        raise ScheduleError(f"{label}: there is one optimizer, so call it on the root's schedule")
    apply = _activations if what == "activations" else _optimizer
    if sch.deferred(apply):
        raise ScheduleError(f"{label}: {what} are offloaded once, and already are")
    check_called(sch, "offload")
    sch.defer("offload", apply)


class OffloadedActivations(Layer):
    """Copies what is saved for the backward pass to host memory."""

    order = 50

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        pin = torch.cuda.is_available() and torch.cuda.is_initialized()
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return inner(*args, **kwargs)


def _activations(sch: ScheduledModule, module: nn.Module, context: Any) -> None:
    add_layer(module, OffloadedActivations())


def _optimizer(sch: ScheduledModule, module: nn.Module, context: Any) -> None:
    make = context.optimizer
    if make is not None:
        context.optimizer = lambda params: OffloadedOptimizer(params, make)
