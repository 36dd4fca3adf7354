"""The first optimizer step: computes its loss and gradients, and checks that it moves all trained parameters."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..results.probe import Computed
from .gradients import computed

if TYPE_CHECKING:
    import torch

    from .training import Training

SAMPLED = 4096
"""Number of elements of a tensor that are checked for a gradient."""
WATCHED = 64
"""Number of these elements whose update is checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """Observations of one rank."""

    computed: Computed
    """Its share of loss and gradients, on the samples of a step."""
    still: tuple[str, ...]
    """Parameters on this rank with a gradient that the step did not change."""


def first_step(training: "Training") -> "tuple[torch.Tensor, StepPart | None]":
    """Runs `training.step()` and observes it.

    Returns:
        Result of the step, and the observations, or None if the step was skipped, as float16 may do.
    """
    loss = training.passes()
    scale = training.precision.loss_scale
    # Dropout changes the gradient of a parameter by more than a fault does.
    computed_step = replace(computed(training, loss, training.samples_per_step, scale), parameters=())
    watched = _watched(training)
    training.update()
    if training.precision.loss_scale < scale:
        return loss, None
    return loss, StepPart(computed=computed_step, still=_unchanged(training, watched))


_Watched = list[tuple[str, Any, slice, Any, Any]]


def _watched(training: "Training") -> _Watched:
    """Name, parameter, stride, observed elements and their values, for every parameter with a gradient."""
    from ..schedule.parallel.sharding import local

    watched: _Watched = []
    for name, param in training.model.named_parameters():
        if param.grad is None:
            continue
        weight, gradient = local(param.detach()).reshape(-1), local(param.grad).reshape(-1)
        # An odd stride also covers the columns of a matrix.
        stride = slice(None, None, weight.numel() // SAMPLED | 1)
        weight, gradient = weight[stride].float(), gradient[stride].float()
        # Elements that an update moves most likely: in a narrow format a small update does not change a large weight.
        promise = gradient.abs() / (weight.abs() + 1e-8)
        best = promise.topk(min(WATCHED, promise.numel())).indices
        best = best[gradient[best] != 0]
        if best.numel():
            watched.append((name, param, stride, best, weight[best]))
    return watched


def _unchanged(training: "Training", watched: _Watched) -> tuple[str, ...]:
    """Names of parameters that did not move. Weights in a narrow format move only if they are small, so those of a
    block are reported only if none of them moved.
    """
    import torch

    from ..schedule.parallel.sharding import local

    if not watched:
        return ()
    moved = [
        (local(param.detach()).reshape(-1)[stride][best].float() != values).any()
        for _, param, stride, best, values in watched
    ]
    groups: dict[Any, list[tuple[str, bool]]] = {}
    for (name, param, *_), has_moved in zip(watched, torch.stack(moved).tolist()):
        group = training.outline.group(name) if param.element_size() < 4 else name
        groups.setdefault(group, []).append((name, has_moved))
    still = [members for members in groups.values() if not any(moved for _, moved in members)]
    return tuple(name for members in still for name, _ in members)
