"""checkpoint: recompute a module's activations in the backward pass instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint, create_selective_checkpoint_contexts

from ...base._torch import OpOverload
from ...base.errors import ScheduleError
from ..caches import without_cache
from ..forward import Layer, add_layer
from ..graph.called import check_called
from ..graph.editing import checkpoint_subgraph
from ..primitive import primitive
from ..tree import ScheduledModule

Policy = Callable[..., Any]


@primitive
def checkpoint(sch: ScheduledModule, subgraph: Any = None, policy: Policy | list[Any] | None = None) -> None:
    """Recomputes this module's activations in the backward pass instead of keeping them.

    Random state is restored for the recomputation, so dropout draws the same mask. Without gradients (or in
    evaluation under `torch.no_grad`) the module runs as it is.

    Args:
        subgraph: one match or a list of matches from `find`, to recompute only these; None for the module.
        policy: None recomputes everything. A list of operators (`[torch.ops.aten.mm.default]`) keeps the
            outputs of these and recomputes the rest; a function `policy(context, op, *args, **kwargs)`
            returns a `torch.utils.checkpoint.CheckpointPolicy` for each operator.

    Raises:
        ScheduleError: the module is checkpointed already; the policy is none of these; an
            inner value of the subgraph is used outside of it.

    Source: https://pytorch.org/docs/stable/checkpoint.html
    """
    _check_policy(policy)
    if subgraph is not None:
        checkpoint_subgraph(sch, subgraph, partial(_options, policy))
        return
    if sch.deferred(_apply):
        raise ScheduleError(f"checkpoint on '{sch.name}': a module is checkpointed once, and it already is")
    check_called(sch, "checkpoint")
    sch.defer("checkpoint", _apply, policy=policy)


class Checkpointed(Layer):
    """Runs what lies within under activation checkpointing."""

    order = 60

    def __init__(self, policy: Any = None) -> None:
        self.policy = policy

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        return torch_checkpoint(inner, *args, use_reentrant=False, **_options(self.policy), **kwargs)


def _options(policy: Any) -> dict[str, Any]:
    if policy is None:
        return {}
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


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
