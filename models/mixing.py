"""Detects models whose result for a sample depends on the other samples of its micro-batch: another `micro_batch` is another
training of these.
"""

from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ..base._transformers import quiet
from .architecture import Architecture
from .batches import ForwardPass, each_tensor, make_batch
from .flops import flops_of
from .reduction import UNABLE
from .skeleton import skeleton
from .tasks import ContrastiveLoss
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn

AFFORDABLE_FLOPS = 3e10
"""Limit on a probe: about a second of a CPU core."""
ROUNDING = 3e-5
"""Tolerance of sums of losses in float32, relative to a loss; reordered sums differ by some 1e-6."""


class Mixing(NamedTuple):
    """How a training mixes samples."""

    reason: str | None = None
    """The part that mixes the samples of a micro-batch; None if there is none."""
    over_replicas: bool = False
    """True if it is over the micro-batches of all replicas together."""


def mixing_of(workload: Workload) -> Mixing:
    """Returns how a workload's training mixes the samples of a micro-batch, as far as is known.

    Batch norms, contrastive losses and losses that balance experts are known. Another workload that is small enough is
    run on the CPU: the loss of two samples must be a sum of a term of each.
    """
    return workload.once(_find_mixing)


def _find_mixing(workload: Workload) -> Mixing:
    from torch import nn

    from ..schedule.parallel.experts import balances

    model = skeleton(workload).train()
    if norms := _batch_norms(model):
        path, norm = next(iter(norms.items()))
        reason = f"{type(norm).__name__} '{path}' takes statistics over a micro-batch"
        return Mixing(reason, any(isinstance(norm, nn.SyncBatchNorm) for norm in norms.values()))
    if isinstance(workload.loss, ContrastiveLoss):
        return Mixing("the contrastive loss compares the samples of a micro-batch")
    if balances(model):
        return Mixing("the loss that balances experts is over the tokens of a micro-batch", over_replicas=True)
    if isinstance(workload.model, Architecture):
        return Mixing()
    cost = flops_of(workload).per_sample
    if cost is None or 8 * cost / 3 > AFFORDABLE_FLOPS or not _inseparable(workload):
        return Mixing()
    return Mixing("the loss of two samples is not a sum of one term for each: something mixes those of a micro-batch")


def _batch_norms(model: "nn.Module") -> "dict[str, nn.Module]":
    """Batch norms that use the statistics of the batch, by path; those that a model keeps in evaluation mode do not."""
    from ..base._torch import BatchNormNd

    modules = model.named_modules()
    return {path: module for path, module in modules if isinstance(module, BatchNormNd) and module.training}


def _inseparable(workload: Workload) -> bool:
    """True if a sample's part of the loss depends on the sample beside it; False where the model cannot be run here."""
    import torch

    config = workload.probe
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
            torch.manual_seed(0)
            step = ForwardPass(workload, workload.build_model(config).train())
            batch = make_batch(workload, 4, 0)
            losses = {}
            # The same seed draws the same dropout masks at each place.
            for pair in product((0, 2), (1, 3)):
                torch.manual_seed(0)
                losses[pair] = float(step(each_tensor(batch, itemgetter(list(pair)))))
    except UNABLE:
        return False
    differs = losses[0, 1] + losses[2, 3] - losses[0, 3] - losses[2, 1]
    return abs(differs) > ROUNDING * max(abs(loss) for loss in losses.values())
