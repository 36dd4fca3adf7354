"""How many floating-point operations training takes, counted without doing them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base._transformers import quiet
from ..base.errors import WorkloadError
from .architecture import Architecture
from .batches import ForwardPass, each_tensor, make_batch
from .reduction import UNABLE, check_mean
from .workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Model FLOPs of one sample."""

    per_sample: float | None
    """Forward and backward, recomputation not included; None where the model cannot be traced."""
    reason: str = ""
    """Why not."""


def flops_of(workload: Workload) -> Flops:
    """Model FLOPs of one sample, counted once; see `count_flops`."""
    return workload.once(count_flops)


def count_flops(workload: Workload) -> Flops:
    """Traces one sample forward and backward with fake tensors: no memory, no arithmetic, a second or a few.

    Matrix products, convolutions and attention count, a multiplication and an addition as two. Attention is
    counted in its eager form and over the whole square, so that every implementation of it counts alike (the
    convention of PaLM, arXiv:2204.02311, appendix B).

    Raises:
        WorkloadError: the batch or the loss is not what it must be; a loss that adds up over samples.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.initialization import no_init_weights

    from ..base._torch import FakeTensorMode
    from ..schedule.parallel.partition import by_shapes_alone

    config: Mapping[str, Any] = workload.probe
    if isinstance(workload.model, Architecture):
        config = {**config, "attention": "eager"}
    batch = make_batch(workload, 1, 0)
    # Meta tensors would do but for transformers, which looks at values unless it sees that it is traced.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.random.fork_rng(devices=[]), quiet(), fake:
            with no_init_weights():  # some look at the values that they draw
                model = by_shapes_alone(workload.build_model(config).train())
            step, fakes = ForwardPass(workload, model), each_tensor(batch, fake.from_tensor)
            with FlopCounterMode(display=False) as counter:
                args, kwargs = step.inputs(fakes)
                output = model(*args, **kwargs)
                step.loss(output, fakes).backward()
    except WorkloadError:
        raise
    except UNABLE as error:
        # Whatever is wrong with the model itself, the trials will tell.
        text = " ".join(str(error).split())[:200]
        return Flops(per_sample=None, reason=f"cannot be traced: {type(error).__name__}: {text}")
    if workload.loss is not None:
        check_mean(workload, output, batch)
    total = counter.get_total_flops()
    if not total:
        return Flops(per_sample=None, reason="it does no operation that is counted")
    return Flops(per_sample=float(total))
