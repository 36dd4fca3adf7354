"""Samples of one optimizer step: a default number that the devices can share, those of a user's own space, and whether those of a
micro-batch depend on each other, so that another `micro_batch` is another training.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product
from operator import itemgetter, mul
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base._transformers import quiet
from ..base.errors import SpaceError, UsageError
from ..knobs.strategy import SPLITS
from ..space import Space
from .architecture import Architecture
from .batches import ForwardPass, each_tensor, make_batch
from .flops import flops_of
from .skeleton import UNABLE, skeleton
from .tasks import ContrastiveLoss
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn


def shareable(usual: int, devices: int) -> int:
    """Returns a global batch for a number of devices: the usual one if they can share it evenly, otherwise the next
    larger one that gives each of them a power of two of samples.

    Plain data parallelism is therefore always possible, with at least a sample per device and a choice of
    micro-batches.

    >>> [shareable(usual, devices) for usual, devices in ((32, 1), (32, 8), (16, 64), (32, 24))]
    [32, 32, 64, 48]
    """
    if usual % devices == 0:
        return usual
    per_device = -(-usual // devices)
    return devices * 2 ** (per_device - 1).bit_length()


def shared(
    workload: Workload, devices: int, *, target: object, requested: int | None
) -> tuple[Workload, tuple[str, ...]]:
    """Returns the workload with a global batch that the devices can share, and notes about it.

    Only a default batch is changed: that of a preset or a configuration file. A requested one, or that of a user's
    workload, is kept.

    Args:
        target: the request's target, from which it was resolved.
    """
    total = workload.global_batch
    if requested is not None or isinstance(target, Workload) or workload.source is not None:
        return workload, too_few(total, devices)
    chosen = shareable(total, devices)
    if chosen == total:
        return workload, ()
    per_device = chosen // devices
    note = (
        f"global batch: {chosen:,}, {per_device} sample{'s'[: per_device > 1]} a device, since none was given and "
        f"{workload.name}'s usual {total} {'is less than' if total < devices else 'cannot be shared by'} the "
        f"{devices:,} devices"
    )
    return workload.with_global_batch(chosen), (note,)


def too_few(total: int, devices: int) -> tuple[str, ...]:
    """Note if a global batch has fewer samples than there are devices."""
    if total >= devices:
        return ()
    return (
        f"the global batch of {total} is less than the {devices:,} devices: at most {total} of them can be "
        f"replicas, and the others only split the model (tp, pp); one of {devices:,} gives each a sample",
    )


def free_accumulation(
    workload: Workload,
    space: Space | None,
    global_batch: int | None,
    override: Mapping[str, Sequence[Any]] | None,
    fix: Mapping[str, Any] | None,
) -> list[int] | None:
    """Values of `grad_accum` if they were given in place of a global batch; None if it is derived.

    Raises:
        UsageError: they are not whole numbers of at least 1.
    """
    fixed = [fix["grad_accum"]] if fix and "grad_accum" in fix else None
    values = (override or {}).get("grad_accum") or fixed
    if values is None or global_batch is not None or space is not None or workload.space is not None:
        return None
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"grad_accum must be whole numbers of at least 1, but got {value!r}")
    return list(dict.fromkeys(values))


def samples_of_a_pass(space: Space, devices: int) -> Any:
    """Samples of one forward and backward pass of all replicas, as an expression over the knobs."""
    degrees = [space[name] for name in SPLITS if name in space.by_name]
    replicas = space["dp"] if "dp" in space.by_name else devices // reduce(mul, degrees) if degrees else devices
    return space["micro_batch"] * replicas


def check_samples(workload: Workload, space: Space, devices: int, requested: int | None) -> tuple[str, ...]:
    """Returns notes about a space in which a step can have other samples than the workload's global batch.

    Args:
        requested: the requested global batch, if any.

    Raises:
        UsageError: a global batch was requested, and no configuration has it.
    """
    knobs, total = space.by_name, workload.global_batch
    counted = [name for name in ("micro_batch", "grad_accum", "dp", *SPLITS) if name in knobs]
    if not {"micro_batch", "grad_accum"} <= set(counted) or any(knobs[name].when is not None for name in counted):
        return ()
    with_global_batch = space.copy()
    try:
        with_global_batch.require(samples_of_a_pass(space, devices) * space["grad_accum"] == total)
    except SpaceError:
        if requested is not None:
            raise UsageError(
                f"the global batch is {total}, but no configuration of the space has micro_batch * dp * grad_accum = "
                f"{total}; derive grad_accum from it, as {total} // micro_batch"
            ) from None
        count = "no configuration has"
    else:
        if not space.enumerable or with_global_batch.size == space.size:
            return ()
        count = f"{with_global_batch.size:,} of {space.size:,} configurations have"
    return (
        f"a step has micro_batch * dp * grad_accum samples, as the space gives them: {count} the workload's "
        f"global batch of {total}; others are another training",
    )


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
