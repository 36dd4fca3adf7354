"""Runs blocks that are cut over tensor-parallel ranks by their shapes alone, before any trial.

Code that reshapes by a size of its own, such as `self.embed_dim`, can be cut, and fails when it is called.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import ScheduleError, WorkloadError
from ..batches import make_batch
from ..skeleton import UNABLE, fake_pass
from ..workload import Workload

if TYPE_CHECKING:
    from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module by position and by name, tensors on the meta device."""


class _AllSeen(BaseException):
    """Ends the model's forward. It is not an error, hence not an Exception."""


def block_calls(workload: Workload, paths: Sequence[str]) -> dict[str, Call]:
    """Returns the arguments of the first block of each list of blocks in a forward pass of one sample, by path; of those that
    are called, if the model can be traced.

    Args:
        paths: all repeated blocks, in order.
    """
    import torch

    from ...base._torch import tree_map_only
    from ...schedule.forward import without_cache

    first_blocks = list({path.rpartition(".")[0]: path for path in reversed(paths)}.values())
    calls: dict[str, Call] = {}

    def see(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        to_meta = tree_map_only(
            torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), without_cache(args, kwargs)
        )
        calls.setdefault(path, to_meta)
        if len(calls) == len(first_blocks):
            raise _AllSeen

    try:
        with fake_pass(workload, workload.probe, make_batch(workload, 1, 0)) as (model, step, batch):
            for path in first_blocks:
                model.get_submodule(path).register_forward_pre_hook(
                    lambda module, args, kwargs, path=path: see(path, args, kwargs), with_kwargs=True
                )
            step(batch)
    except _AllSeen:
        pass
    except (*UNABLE, WorkloadError):
        return {}  # trials report errors of the model itself
    return calls


def check_calls(uncut: "nn.Module", cut: "nn.Module", calls: Mapping[str, Call], ranks: int) -> None:
    """Calls the cut blocks of a model on the meta device.

    Args:
        uncut: the model on the meta device, not cut. A block that fails in it as well is not checked.
        cut: the same, cut over `ranks` ranks.

    Raises:
        ScheduleError: a block fails; names the line of its code.
    """
    from ...schedule.graph.tracing import cause

    for path, call in calls.items():
        if _failure(uncut, path, call) is not None or (error := _failure(cut, path, call)) is None:
            continue
        raise ScheduleError(f"tp: '{path}' cannot be called with its weights cut over {ranks} ranks: {cause(error)}")


def _failure(model: "nn.Module", path: str, call: Call) -> Exception | None:
    import torch

    from ...schedule.parallel.partition import EitherWay

    args, kwargs = call
    try:
        with torch.no_grad(), EitherWay():
            model.get_submodule(path)(*args, **kwargs)
    except UNABLE as error:
        return error
    return None
