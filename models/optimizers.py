"""The optimizer of a workload, by its class and settings."""

import inspect
from typing import Any

from .reduction import UNABLE
from .workload import Workload

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that select an implementation: knobs do so here."""


def optimizer_settings(workload: Workload) -> dict[str, Any] | None:
    """Returns the optimizer that a workload defines as JSON-ready data; None if it defines none and trains with AdamW.

    `class` is the name of its class. The other entries are settings by name: the learning rate, those that differ from the
    defaults of the class, and `groups`, the number of parameter groups, if their settings differ. `class` is empty, and the only
    entry, if the workload's function cannot create an optimizer for a single parameter.
    """
    import torch

    if workload.optimizer is None:
        return None
    try:
        optimizer = workload.make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))], fused=False)
    except UNABLE:
        # The function reads parameters of the model by name or number. An error of the user's is reported by the trials.
        return {"class": ""}
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
