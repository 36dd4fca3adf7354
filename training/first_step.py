"""What the first optimizer step computes, and whether it moves what it must."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..results.probe import Computed
from .gradients import computed

if TYPE_CHECKING:
    import torch

    from .training import Training

SAMPLED = 4096
"""Elements of a tensor that are looked at for whether they have a gradient."""
WATCHED = 64
"""Elements of a tensor whose update is watched, of those that were looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """What one rank saw of it."""

    computed: Computed
    """Its share of loss and gradients, on the samples of a step."""
    still: tuple[str, ...]
    """Parameters that have a gradient, and that the step left as they were; of what this rank holds."""


def first_step(training: "Training") -> "tuple[torch.Tensor, StepPart | None]":
    """`training.step()`, watched.

    Returns:
        What it returns; and what was seen, or None where the step was skipped, as float16 does by design.
    """
    loss = training.passes()
    scale = training.precision.loss_scale
    found = computed(training, loss, training.samples_per_step, scale)
    watched = _watched(training)
    training.update()
    if training.precision.loss_scale < scale:
        return loss, None
    return loss, StepPart(computed=found, still=_still(training, watched))


_Watched = list[tuple[str, Any, slice, Any, Any]]


def _watched(training: "Training") -> _Watched:
    """Of every parameter with a gradient: name, parameter, a stride, which elements of that, their values."""
    from ..schedule.parallel.sharding import local

    out: _Watched = []
    for name, param in training.model.named_parameters():
        if param.grad is None:
            continue
        weight, gradient = local(param.detach()).reshape(-1), local(param.grad).reshape(-1)
        # An odd stride walks through the columns of a matrix, too.
        stride = slice(None, None, weight.numel() // SAMPLED | 1)
        weight, gradient = weight[stride].float(), gradient[stride].float()
        # Those that an update moves most likely: in a narrow format large weights do not move by little.
        promise = gradient.abs() / (weight.abs() + 1e-8)
        best = promise.topk(min(WATCHED, promise.numel())).indices
        best = best[gradient[best] != 0]
        if best.numel():
            out.append((name, param, stride, best, weight[best]))
    return out


def _still(training: "Training", watched: _Watched) -> tuple[str, ...]:
    """Names of parameters that did not move. Of weights in a narrow format, which move only where they are
    small, those of a block are named if none of it moved."""
    import torch

    from ..schedule.parallel.sharding import local

    if not watched:
        return ()
    moved = [
        (local(param.detach()).reshape(-1)[stride][best].float() != before).any()
        for _, param, stride, best, before in watched
    ]
    groups: dict[Any, list[tuple[str, bool]]] = {}
    for (name, param, *_), each in zip(watched, torch.stack(moved).tolist()):
        group = training.outline.group(name) if param.element_size() < 4 else name
        groups.setdefault(group, []).append((name, each))
    still = [members for members in groups.values() if not any(moved for _, moved in members)]
    return tuple(name for members in still for name, _ in members)
