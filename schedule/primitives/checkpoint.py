"""checkpoint: recomputes a module's activations in the backward pass instead of keeping them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts as selective_contexts,
)

from ...base._torch import BatchNormNd, OpOverload
from ...base.errors import ScheduleError
from ..forward import Inner, Layer, add_layer, without_cache
from ..graph.called import check_called
from ..graph.editing import checkpoint_subgraph
from ..tree import ScheduledModule, primitive

Policy = Callable[..., Any]


@primitive
def checkpoint(sch: ScheduledModule, subgraph: Any = None, policy: Policy | list[Any] | None = None) -> None:
    """Recomputes this module's activations in the backward pass instead of keeping them.

    Random state is restored for the recomputation, so dropout draws the same mask; running statistics of batch norms
    are updated once per step. Without gradients (or in evaluation under `torch.no_grad`) the module runs unchanged.

    Args:
        subgraph: one match or a list of matches from `find`, to recompute only these; None for the module.
        policy: None recomputes everything. A list of operators (`[torch.ops.aten.mm.default]`) keeps their outputs and
            recomputes the rest; a function `policy(context, op, *args, **kwargs)` returns a
            `torch.utils.checkpoint.CheckpointPolicy` for each operator.

    Raises:
        ScheduleError: the module is checkpointed already; the policy has another type; or an inner value of the
            subgraph is used outside it.

    Source: https://pytorch.org/docs/stable/checkpoint.html
    """
    _check_policy(policy)
    if subgraph is not None:
        checkpoint_subgraph(sch, subgraph, partial(_options, policy))
        return
    if sch.deferred(_apply):
        raise ScheduleError(f"checkpoint on '{sch.name}': the module is checkpointed already")
    check_called(sch, "checkpoint")
    sch.defer("checkpoint", _apply, policy=policy)


class Checkpointed(Layer):
    """Runs its inner layers under activation checkpointing."""

    order = 60  # around casts and random streams, which the recomputation repeats

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        count, names = len(args), tuple(kwargs)

        def run(*values: Any) -> Any:
            return inner(*values[:count], **dict(zip(names, values[count:])))

        # Keyword arguments as positional ones: torch saves the random states of the devices of positional ones only.
        return torch_checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **_options(self.policy, module))


def _options(policy: Any, module: nn.Module) -> dict[str, Any]:
    """Returns the options of torch's checkpoint."""
    norms = [submodule for submodule in module.modules() if isinstance(submodule, BatchNormNd)]
    if policy is None and not norms:
        return {}

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = (nullcontext(), nullcontext()) if policy is None else selective_contexts(policy)
        return forward, _statistics_kept(recomputation, norms)

    return {"context_fn": contexts}


@contextmanager
def _statistics_kept(context: AbstractContextManager[Any], norms: Sequence[Any]) -> Iterator[None]:
    """Returns a context in which batch norms compute as usual without changing their running statistics.

    It sets momentum to 0 rather than `track_running_stats` to False: the recomputation must save as many tensors as
    the first run. The count of batches, which does not depend on momentum, is restored.
    """
    saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    counts = [None if count is None else count.clone() for _, _, count in saved]
    for norm, _, _ in saved:
        norm.momentum = 0.0
    try:
        with context:
            yield
    finally:
        for (norm, momentum, count), saved_count in zip(saved, counts):
            norm.momentum = momentum
            if count is not None:
                count.copy_(saved_count)


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, policy: Any) -> None:
    add_layer(module, Checkpointed(policy))


def _check_policy(policy: Any) -> None:
    if policy is None or callable(policy):
        return
    if isinstance(policy, (list, tuple)) and all(isinstance(op, OpOverload) for op in policy):
        return
    raise ScheduleError(
        "checkpoint: policy must be None, a function or a list of operator overloads such as "
        f"torch.ops.aten.mm.default, but got {policy!r}"
    )
