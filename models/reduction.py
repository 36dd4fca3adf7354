"""Checks that a loss is the mean over the samples of its batch, without running the model."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from .batches import each_tensor
from .workload import Batch, Workload

if TYPE_CHECKING:
    import torch

COPIES = (8, 2)
"""Numbers of copies of a sample that are tried; the largest affordable one is used."""
AFFORDABLE_BYTES = 512 * 1024 * 1024
"""Limit on synthetic outputs. A model with a larger output for two samples is not checked."""
UNABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of user code that cannot handle the given values."""
WITHIN = 0.02
"""Tolerance of the factor between losses; bfloat16 has 8 bits."""


def check_mean(workload: Workload, output: Any, batch: Batch) -> None:
    """Refuses a loss that is a sum over samples: configurations with other micro-batches would train something else.

    The loss of several copies of a sample must equal that of one. The model's output is synthetic, with the traced
    shapes: random numbers between 0 and 1, which are also valid probabilities. A loss that cannot be computed from
    these is not checked.

    Args:
        workload: with its own loss.
        output: the model's output for `batch`; only shapes and types are used.
        batch: a batch of one sample.

    Raises:
        WorkloadError: the loss of n copies is n times that of one.
    """
    import torch

    assert workload.loss is not None
    generator = torch.Generator().manual_seed(0)
    try:
        size = _num_bytes(output)
        count = next((copies for copies in COPIES if (copies + 1) * size <= AFFORDABLE_BYTES), None)
        if count is None:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            synthetic = _map_tensors(output, lambda tensor: _synthetic(tensor, generator))
            loss = float(workload.loss(synthetic, batch))
            loss_of_copies = float(
                workload.loss(
                    _map_tensors(synthetic, lambda tensor: _copies(tensor, count)),
                    each_tensor(batch, lambda tensor: _copies(tensor, count)),
                )
            )
    except UNABLE:
        return  # it needs more than the shape of an output; a trial reports actual errors
    if loss and math.isclose(loss_of_copies / loss, count, rel_tol=WITHIN):
        raise WorkloadError(
            f"{workload.name}: the loss at micro-batch {count} is {_times(count)} the one at 1: is it a sum? "
            "loss(output, batch) must be the mean over the batch's samples, or configurations of other "
            "micro-batches would train something else; divide it by their number, or use reduction='mean'"
        )


def _times(count: int) -> str:
    return {2: "twice", 8: "eight times"}[count]


def _synthetic(like: "torch.Tensor", generator: "torch.Generator") -> "torch.Tensor":
    import torch

    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    return (0.1 + 0.8 * torch.rand(like.shape, generator=generator)).to(like.dtype)


def _copies(tensor: "torch.Tensor", count: int) -> "torch.Tensor":
    """Copies along the samples; a tensor without a dimension of one sample is unchanged."""
    if not tensor.dim() or tensor.shape[0] != 1:
        return tensor
    return tensor.repeat(count, *[1] * (tensor.dim() - 1))


def _num_bytes(output: Any) -> int:
    size = 0

    def add(tensor: "torch.Tensor") -> "torch.Tensor":
        nonlocal size
        size += tensor.numel() * tensor.element_size()
        return tensor

    _map_tensors(output, add)
    return size


def _map_tensors(value: Any, function: "Callable[[torch.Tensor], Any]") -> Any:
    """Applies `function` to every tensor in a model's output."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)  # transformers' outputs are mutable mappings with attributes
        for key, item in value.items():
            copied[key] = _map_tensors(item, function)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _map_tensors(getattr(value, name), function) for name in names})
    return value
