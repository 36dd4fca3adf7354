"""ulysses: sequences cut over ranks, which have all of each other's tokens for some of the heads in attention."""

from ...errors import ScheduleError
from ..forward import layers_of
from ..parallel.collectives import Axis, axis_of, divided
from ..parallel.planned import PlannedMesh
from ..parallel.ulysses import CutSequence, cut_sequence, obstacle
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def ulysses(sch: ScheduledModule, ranks: int) -> None:
    """Cuts every sequence over groups of neighbours along the `dp` axis of the mesh, which share samples then.

    The model is given whole samples on each of them, computes on its piece, and exchanges tokens for heads around
    attention, whatever implementation of transformers that is. Keys of fewer heads than ranks are repeated. Its loss is
    this rank's part, such that the mean over the axis is the loss of all samples: `shard_data` averages gradients
    so. All ranks call it.

    Args:
        ranks: how many share a sample; they divide its tokens and the heads.

    Raises:
        ScheduleError: not the root; no `dp` axis, or one that such groups do not divide; called before; a model that
            attends by code of its own; heads that the ranks do not divide.

    Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509).
    """
    label = f"ulysses on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: sequences are cut for the whole model, so call it on the root's schedule")
    along = axis_of(sch.mesh, "dp")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2 or along is None or along.size % ranks:
        given = "there is none" if along is None else f"has {along.size} ranks"
        raise ScheduleError(
            f"{label}: the mesh's dp axis must be of groups of ranks, two or more each, but {given} and ranks is {ranks!r}"
        )
    if layers_of(sch.module, CutSequence):
        raise ScheduleError(f"{label}: sequences are cut once, and they already are")
    tensor = axis_of(sch.mesh, "tp")
    tp = 1 if tensor is None else tensor.size
    if why := obstacle(sch.module, ranks, tp):
        raise ScheduleError(f"sp: {why}")
    cut_sequence(sch.module, _axis(sch.mesh, ranks, along), tp)


def _axis(mesh: object, ranks: int, along: Axis) -> Axis:
    """The axis of the ranks that share samples."""
    if isinstance(mesh, PlannedMesh):
        return Axis("sp", ranks, 0, along.group_name)
    found = axis_of(divided(mesh, "dp", along.size // ranks), "shard")
    assert found is not None, "a mesh that is divided has it"
    return Axis("sp", found.size, found.rank, found.group_name)
