"""The optimizer of a workload, by its class and settings."""

import inspect
from typing import Any

from .reduction import UNABLE
from .workload import Workload

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that select an implementation, which a knob does here."""


def optimizer_settings(workload: Workload) -> dict[str, Any] | None:
    """Returns the `class` of a workload's own optimizer, and its settings by name: the learning rate, and others that are not the
    class's defaults. `groups` is the number of its groups of parameters if their settings differ. None for the AdamW of workloads
    without one; the class is empty if its function cannot make one of a single parameter."""
    import torch

    if workload.optimizer is None:
        return None
    try:
        optimizer = workload.make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))], fused=False)
    except UNABLE:
        return {"class": ""}  # it reads the model; trials report actual errors
    parameters = inspect.signature(type(optimizer).__init__).parameters
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in optimizer.defaults.items()
        if name not in _IMPLEMENTATION
        and isinstance(value, (bool, int, float, str, tuple))
        and name in parameters
        and (name == "lr" or value != parameters[name].default)
    }
    if any(group[name] != value for group in optimizer.param_groups for name, value in optimizer.defaults.items()):
        settings["groups"] = len(optimizer.param_groups)
    module = type(optimizer).__module__
    name = type(optimizer).__qualname__
    return {"class": f"torch.optim.{name}" if module.startswith("torch.optim.") else f"{module}.{name}", **settings}
