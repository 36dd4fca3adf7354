"""Restores a training from the latest intact checkpoint. Each rank reads only what it needs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...base.errors import StudyError
from ...models.layouts.dcp import dcp_tensors
from ...models.layouts.lazy import LazyTensors
from ...models.layouts.weights import Weights
from .folder import KEPT, REPLACES, Checkpoint, CheckpointFolder, Report, ignore, put_aside
from .saver import Saver, gathered
from .state import State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


REPAIRED = "where the training began with --from, --resume takes them from there again"


def latest(
    folder: CheckpointFolder, group: "ProcessGroup | None", say: Callable[[str], None], report: Report = ignore
) -> Checkpoint | None:
    """Returns the latest intact checkpoint. All ranks call it, and each checks some of the files.

    Args:
        group: gloo group of all ranks; None for one rank.
        say: receives messages about damaged checkpoints.
        report: receives this rank's progress.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        StudyError: all checkpoints are damaged; the message names them.
    """
    damaged = []
    for found in _from_rank_0(folder.all(), group):
        failure = check(found, group, report)
        if not failure:
            return found
        damaged.append(failure)
        say(f"checkpoint {found.path.name} is passed over: {failure}")
    if damaged:
        raise StudyError(f"no checkpoint in '{folder.path}' is whole: {damaged[0]}")
    return None


def check(found: Checkpoint, group: "ProcessGroup | None", report: Report = ignore) -> str:
    """Returns the damage of a checkpoint, the same on every rank; empty if there is none."""
    rank, ranks = _place(group)
    failure = _failure_of(lambda: found.check(rank, ranks, report))
    if not failure and (failure := _failure_of(lambda: found.check_frozen(rank, ranks, report))):
        failure += f"; {REPAIRED}"
    return next(filter(None, gathered(failure, group)), "")


def frozen_damage(folder: CheckpointFolder, group: "ProcessGroup | None") -> str:
    """Returns the damage of the frozen tensors of the latest checkpoint with a sound manifest, the same on every
    rank; empty if there is none.
    """
    rank, ranks = _place(group)
    found = next((each for each in _from_rank_0(folder.all(), group) if each.intact), None)
    failure = "" if found is None else _failure_of(lambda: found.check_frozen(rank, ranks))
    return next(filter(None, gathered(failure, group)), "")


def keep_again(state: State, weights: Weights, folder: CheckpointFolder, saver: Saver, rank: int) -> None:
    """Replaces a damaged copy of the frozen weights; all ranks call it.

    Args:
        weights: weights that the training began with.

    Raises:
        StudyError: they cannot be saved.
    """
    sound = [each for each in (*folder.all(), *folder.frozen.all()) if each.intact]
    seals = {seal for each in sound for seal in (each.manifest.get(KEPT), *each.manifest.get(REPLACES, ())) if seal}
    saver.gathered(None)  # before anything is moved
    if rank == 0:
        for each in folder.frozen.all():
            put_aside(each)
    saver.gathered(None)
    state.load_weights(weights)
    if failure := saver.keep_again(state, sorted(seals)):
        raise StudyError(f"the weights that are not trained cannot be kept again in '{folder.frozen.path}': {failure}")


def _failure_of(what: Callable[[], None]) -> str:
    try:
        what()
    except StudyError as error:
        return str(error)
    return ""


def restore(state: State, found: Checkpoint, report: Report = ignore) -> None:
    """Loads a checkpoint into a training, and reports this rank's progress.

    Raises:
        WorkloadError: it is of another model.
    """
    state.load(stored_in(found), found.path.name, report)


def stored_in(found: Checkpoint) -> LazyTensors:
    """The tensors of a checkpoint, including frozen ones."""
    kept = {} if found.frozen is None else dcp_tensors(found.frozen.path)
    return {**kept, **dcp_tensors(found.path)}


def _from_rank_0(found: list[Checkpoint], group: "ProcessGroup | None") -> list[Checkpoint]:
    """Returns the list that rank 0 sees on every rank: another host may see a new checkpoint later."""
    seen: list[Checkpoint] = gathered(found, group)[0]
    return seen


def _place(group: "ProcessGroup | None") -> tuple[int, int]:
    if group is None:
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)
