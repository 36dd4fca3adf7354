"""Checks that a loss is the mean over the samples of its batch, without running the model."""

import math
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

    from ..base._torch import tree_leaves, tree_map_only

    assert workload.loss is not None
    generator = torch.Generator().manual_seed(0)
    try:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        size = sum(tensor.nbytes for tensor in tensors)
        count = next((copies for copies in COPIES if (copies + 1) * size <= AFFORDABLE_BYTES), None)
        if count is None:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            synthetic = tree_map_only(torch.Tensor, lambda tensor: _synthetic(tensor, generator), output)
            loss = float(workload.loss(synthetic, batch))
            loss_of_copies = float(
                workload.loss(
                    tree_map_only(torch.Tensor, lambda tensor: _copies(tensor, count), synthetic),
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
