"""Counts the floating-point operations of training without running it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import WorkloadError
from .architecture import Architecture
from .batches import make_batch
from .reduction import UNABLE, check_mean
from .skeleton import fake_pass
from .workload import Workload


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
