"""sync: a collective over the tensor-parallel axis, before or after a module's forward or backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...base._torch import parameters_of
from ...base.errors import ScheduleError, unknown
from .. import collectives as differentiable
from ..graph.called import check_called, used
from ..parallel import collectives
from ..parallel.collectives import Axis, through
from ..parallel.exchange import InputSync, OutputSync, ParameterSync, Sync, syncs_of
from ..parallel.sharding import shards_of
from ..primitive import primitive
from ..tree import ScheduledModule
from .kinds import input_of, output_of
from .shard import tensor_parallel

MODES = ("fwd_pre", "fwd_post", "bwd_pre", "bwd_post")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter", "all_to_all")
GRADIENTS = ("scatter", "reduce_scatter")
SUMS = ("all_reduce", "reduce_scatter")
ON = ("activations", "parameters")


@primitive
def sync(
    sch: ScheduledModule,
    mode: str,
    op: str | Callable[[torch.Tensor], torch.Tensor],
    axis: int | None = None,
    on: str = "activations",
    join: int | None = None,
    gradient: str | None = None,
) -> None:
    """Exchanges values or gradients between the ranks of the `tp` axis around this module.

    | mode | acts on | gradient |
    |---|---|---|
    | `fwd_pre` | the input, before the forward | the matching collective on the input's gradient |
    | `fwd_post` | the output, after the forward | the matching collective on the output's gradient |
    | `bwd_pre` | the gradient of the output, before the backward | |
    | `bwd_post` | the gradient of the inputs, after the backward | |

    The gradient of `all_reduce` passes as it is, that of `reduce_scatter` and `scatter` is gathered, that of
    `all_gather` is scattered after the forward and reduce-scattered before it, where ranks go on with
    different work; that of `all_to_all` goes the way back. The input is the first floating-point argument; an output
    may be a tuple or a mapping, of which the first floating-point tensor is meant.

    Args:
        mode: when, as above.
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, or a function of a tensor.
        axis: the dimension, for all but `all_reduce`; of `all_to_all` the one that is cut.
        on: `parameters` with `bwd_post` and `all_reduce` sums the gradients of this module's own whole
            parameters instead: where activations are cut along the sequence, each rank has but a part.
        join: of `all_to_all`, the dimension along which the pieces of all ranks are joined.
        gradient: of `all_gather`, what becomes of the gradient in place of the above: `reduce_scatter` where ranks go
            on with different work, `scatter` where they do the same.

    Raises:
        ScheduleError: unknown mode or op; axis missing; what the sharded weights of this module contradict.
    """
    ranks = tensor_parallel(sch, "sync")
    check_called(sch, "sync")
    _check_sync(sch, mode, op, axis, on)
    _check_dims(sch, mode, op, join, gradient)
    module = sch.module
    what = Sync(mode=mode, op=op, axis=axis, on=on, join=join, gradient=gradient)
    if on == "parameters":
        module.register_forward_pre_hook(ParameterSync(what, ranks))
    elif mode == "fwd_pre":
        module.register_forward_pre_hook(InputSync(what, _forward(what, ranks)), with_kwargs=True)
    elif mode == "bwd_post":
        module.register_forward_pre_hook(InputSync(what, _backward(what, ranks)), with_kwargs=True)
    elif mode == "fwd_post":
        module.register_forward_hook(OutputSync(what, _forward(what, ranks)))
    else:
        module.register_forward_hook(OutputSync(what, _backward(what, ranks)))


def check_synced(sch: ScheduledModule) -> None:
    """Refuses a schedule in which partial sums are never added up, or half of a linear layer is cut.

    Raises:
        ScheduleError: names the module.
    """
    root = sch.tree.module
    alive, _ = used(root)
    for path, module in root.named_modules():
        if not shards_of(module):
            continue
        bias = parameters_of(module).get("bias")
        if output_of(module) == "split" and bias is not None and "bias" not in shards_of(module):
            raise ScheduleError(
                f"build: the weight of '{path}' is cut along the output, so its bias must be too; "
                f"sch['{path}'].shard('bias', axis=0)"
            )
        if output_of(module) != "partial":
            continue
        above = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)] + [""]
        around = [each for place in above if (each := root.get_submodule(place)) in alive]
        syncs = [*module.__dict__.get("_handed_over", ()), *(sync for each in around for sync in syncs_of(each))]
        if not any(each.mode == "fwd_post" and (callable(each.op) or each.op in SUMS) for each in syncs):
            raise ScheduleError(
                f"build: '{path}' gives partial sums on each rank, and nothing adds them up; "
                f"sch['{path}'].sync('fwd_post', 'all_reduce')"
            )


def _check_sync(sch: ScheduledModule, mode: str, op: Any, axis: int | None, on: str) -> None:
    label = f"sync on '{sch.name}'"
    if mode not in MODES:
        raise ScheduleError(f"{label}: {unknown('mode', mode, MODES)}")
    if not callable(op) and op not in OPS:
        raise ScheduleError(f"{label}: {unknown('op', op, OPS)}")
    if on not in ON:
        raise ScheduleError(f"{label}: {unknown('on', on, ON)}")
    if op in OPS[1:] and axis is None:
        raise ScheduleError(f"{label}: {op} needs the dimension to act along; pass axis=")
    if on == "parameters" and (mode, op) != ("bwd_post", "all_reduce"):
        raise ScheduleError(
            f"{label}: on='parameters' goes with 'bwd_post' and 'all_reduce', but got {mode!r} and {op!r}"
        )
    if callable(op) or on == "parameters":
        return
    module = sch.module
    output, cut = output_of(module), any(shards_of(each) for each in module.modules())
    sums = op in SUMS
    if mode == "fwd_post" and sums and output == "split":
        raise ScheduleError(
            f"{label}: {op} adds up partial sums, but its weight is cut along the output, so that each rank "
            "has other features; use all_gather, or cut along the input"
        )
    summed = any(each.mode == "fwd_post" and (callable(each.op) or each.op in SUMS) for each in syncs_of(module))
    if mode == "fwd_post" and op == "all_gather" and output == "partial" and not summed:
        raise ScheduleError(
            f"{label}: all_gather joins pieces, but its weight is cut such that each rank has a partial sum; "
            "use all_reduce or reduce_scatter"
        )
    if mode == "fwd_post" and op == "all_gather" and any(e.padded for e in shards_of(module).values()):
        raise ScheduleError(
            f"{label}: all_gather would leave the zeros with which its pieces are filled up among the features; "
            "use parallel_loss, or a size that the ranks divide"
        )
    if mode in ("fwd_post", "bwd_post") and sums and not cut:
        raise ScheduleError(
            f"{label}: {op} adds up what ranks computed from pieces, but nothing in it is sharded, so that "
            "every rank has the whole; shard first"
        )
    if mode == "bwd_post" and sums and input_of(module) == "split":
        raise ScheduleError(
            f"{label}: its weight is cut along the input, so the gradient of the input is each rank's own "
            f"piece; {op} would mix them"
        )


def _check_dims(sch: ScheduledModule, mode: str, op: Any, join: int | None, gradient: str | None) -> None:
    label = f"sync on '{sch.name}'"
    if (op == "all_to_all") != (join is not None):
        raise ScheduleError(f"{label}: all_to_all, and nothing else, joins along another dimension than it cuts; join=")
    if gradient is None:
        return
    if gradient not in GRADIENTS:
        raise ScheduleError(f"{label}: {unknown('gradient', gradient, GRADIENTS)}")
    if op != "all_gather" or mode not in ("fwd_pre", "fwd_post"):
        raise ScheduleError(
            f"{label}: gradient goes with all_gather at 'fwd_pre' or 'fwd_post', but got {op!r} at {mode!r}"
        )


def _forward(sync: Sync, ranks: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    op, axis = sync.op, sync.axis or 0
    if callable(op):
        return op
    if op == "all_reduce":
        return partial(differentiable.all_reduce, axis=ranks)
    if op == "all_to_all":
        return partial(differentiable.all_to_all, dim=axis, join=sync.join or 0, axis=ranks)
    if op == "all_gather":
        gradient = sync.gradient or ("reduce_scatter" if sync.mode == "fwd_pre" else "scatter")
        return partial(differentiable.all_gather, dim=axis, axis=ranks, gradient=gradient)
    return partial(getattr(differentiable, op), dim=axis, axis=ranks)


def _backward(sync: Sync, ranks: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    op = sync.op
    if callable(op):
        return partial(through, backward=op)
    dims = {} if op == "all_reduce" else {"dim": sync.axis}
    if op == "all_to_all":
        dims["join"] = sync.join
    return partial(through, backward=partial(getattr(collectives, op), axis=ranks, **dims))
