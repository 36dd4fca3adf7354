"""Going on from a checkpoint: the latest that is whole, read on each rank as far as that needs it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...base.errors import StudyError
from ...models.layouts.dcp import dcp_tensors
from ...models.layouts.lazy import LazyTensors
from .folder import Checkpoint, CheckpointFolder
from .state import State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def latest(folder: CheckpointFolder, group: "ProcessGroup | None", say: Callable[[str], None]) -> Checkpoint | None:
    """The latest checkpoint whose files are what they were when saved; all ranks call it, and each reads some of them.

    Args:
        folder: where they are.
        group: of all ranks, of the gloo backend; None for one rank.
        say: told which are damaged.

    Returns:
        The checkpoint; None where there is none at all.

    Raises:
        StudyError: there are some, and all are damaged; names them.
    """
    damaged = []
    for found in _alike(folder.all(), group):
        failure = check(found, group)
        if not failure:
            return found
        damaged.append(failure)
        say(f"checkpoint {found.path.name} is passed over: {failure}")
    if damaged:
        raise StudyError(f"no checkpoint in '{folder.path}' is whole: {damaged[0]}")
    return None


def check(found: Checkpoint, group: "ProcessGroup | None") -> str:
    """What is wrong with a checkpoint, on every rank alike; empty where nothing is."""
    rank, ranks = _place(group)
    try:
        for each in (found, found.frozen):
            if each is not None:
                each.check(each.files()[rank::ranks])
        failure = ""
    except StudyError as error:
        failure = str(error)
    return next(filter(None, _gathered(failure, group)), "")


def restore(state: State, found: Checkpoint) -> None:
    """Puts a checkpoint's tensors in the place of a training's.

    Raises:
        WorkloadError: it is of another model.
    """
    state.load(stored_in(found))


def stored_in(found: Checkpoint) -> LazyTensors:
    """The tensors of a checkpoint, those that no step changes too."""
    kept = {} if found.frozen is None else dcp_tensors(found.frozen.path)
    return {**kept, **dcp_tensors(found.path)}


def _alike(found: list[Checkpoint], group: "ProcessGroup | None") -> list[Checkpoint]:
    """Those that rank 0 sees, on every rank: a folder on another host's disk may show a new one later."""
    return found if group is None else _gathered(found, group)[0]


def _place(group: "ProcessGroup | None") -> tuple[int, int]:
    if group is None:
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def _gathered(value: Any, group: "ProcessGroup | None") -> list[Any]:
    if group is None:
        return [value]
    import torch.distributed as dist

    out = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out
