"""Counts the floating-point operations of training without running it, and checks that the loss is a mean over samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from .architecture import Architecture
from .batches import each_tensor, make_batch
from .skeleton import UNABLE, fake_pass
from .workload import Batch, Workload

if TYPE_CHECKING:
    import torch

COPIES = (8, 2)
"""Numbers of copies of a sample that are tried; the largest affordable one is used."""
AFFORDABLE_BYTES = 512 * 1024 * 1024
"""Limit on synthetic outputs. A model with a larger output for two samples is not checked."""
WITHIN = 0.02
"""Tolerance of the factor between losses; bfloat16 has 8 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Model FLOPs of one sample."""

    per_sample: float | None
    """Forward and backward, without recomputation; None if the model cannot be traced."""
    reason: str = ""
    """Reason for None."""


def flops_of(workload: Workload) -> Flops:
    """Model FLOPs of one sample, counted once per workload; see `count_flops`."""
    return workload.once(count_flops)


def follows_values(reason: str) -> bool:
    """True if a reason of `Flops` is that the model depends on values, such as layers dropped at random, which a run has."""
    return any(name in reason for name in ("DataDependentOutputException", "DynamicOutputShapeException"))


def count_flops(workload: Workload, samples: int = 1) -> Flops:
    """Traces `samples` forward and backward with fake tensors, without memory or arithmetic, in a few seconds.

    Matrix products, convolutions and attention count, a multiplication and an addition as two operations. Attention is
    counted in its eager form and over the whole square, so that every implementation counts the same (the convention
    of PaLM, arXiv:2204.02311, appendix B). A batch norm after global pooling has no statistics of one sample: it gets two.

    Raises:
        WorkloadError: the batch or the loss is invalid, for example a loss that is a sum over samples.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config: Mapping[str, Any] = workload.probe
    if isinstance(workload.model, Architecture):
        config = {**config, "attention": "eager"}
    batch = make_batch(workload, samples, 0)
    try:
        with fake_pass(workload, config, batch) as (model, step, fakes):
            with FlopCounterMode(display=False) as counter:
                args, kwargs = step.inputs(fakes)
                output = model(*args, **kwargs)
                step.loss(output, fakes).backward()
    except WorkloadError:
        raise
    except UNABLE as error:
        # Errors of the model itself are reported by the trials.
        message = " ".join(str(error).split())[:200]
        if samples == 1 and "more than 1 value per channel" in message:
            return count_flops(workload, 2)
        return Flops(per_sample=None, reason=f"cannot be traced: {type(error).__name__}: {message}")
    if workload.loss is not None:
        check_mean(workload, output, batch)
    total = counter.get_total_flops()
    if not total:
        return Flops(per_sample=None, reason="it has no operation that is counted")
    return Flops(per_sample=total / samples)


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
