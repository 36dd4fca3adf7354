"""annotate: attach a value to a parameter."""

from typing import Any

import torch

from ...base._torch import buffers_of, parameters_of
from ...base.errors import ScheduleError, unknown
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def annotate(sch: ScheduledModule, param: str, key: str, value: Any) -> None:
    """Attaches `value` to a parameter or buffer of this module, to be read as `module.<param>.<key>`.

    It survives replacement, sharding and materialisation: `build` attaches it to the final tensor.

    Raises:
        ScheduleError: no such parameter; the key is no identifier or is an attribute of every tensor.
    """
    tensor = tensor_of(sch, param, "annotate")
    if not key.isidentifier() or hasattr(torch.Tensor, key):
        raise ScheduleError(
            f"annotate '{param}' of '{sch.name}': key must be an identifier that tensors do not have, but got '{key}'"
        )
    setattr(tensor, key, value)
    sch.tree.annotations.setdefault((sch.path, param), {})[key] = value


def tensor_of(sch: ScheduledModule, name: str, primitive: str) -> torch.Tensor:
    """A parameter or buffer held by this very module.

    Raises:
        ScheduleError: there is none of that name.
    """
    module = sch.module
    held = {**parameters_of(module), **buffers_of(module)}
    tensor = held.get(name)
    if tensor is None:
        known = [each for each, value in held.items() if value is not None]
        raise ScheduleError(f"{primitive} on '{sch.name}': {unknown('parameter or buffer', name, known)}")
    return tensor
