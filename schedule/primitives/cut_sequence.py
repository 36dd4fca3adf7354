"""cut_sequence: sequences cut over ranks, which exchange tokens for heads in attention, or keys and values in a ring."""

from math import prod

from ...base.errors import ScheduleError
from ...knobs.sequence import SequenceShards
from ..forward import layers_of
from ..parallel.collectives import Axis, axis_of, divided
from ..parallel.planned import PlannedMesh
from ..parallel.sequences import CutSequence, cut_sequence as cut, obstacle
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def cut_sequence(sch: ScheduledModule, sp: int = 1, cp: int = 1) -> None:
    """Cuts every sequence over groups of `cp * sp` neighbours along the `dp` axis of the mesh, which share samples then.

    The model is given whole samples on each of them and computes on its piece. Around attention `sp` neighbours exchange
    tokens for heads (Ulysses), whatever implementation of transformers that is; keys of fewer heads than ranks are
    repeated. Keys and values go round among `cp` ranks (ring attention), each of which has two stretches of the sequence,
    from its beginning and from its end. The model's loss is this rank's part, such that the mean over the axis is the loss
    of all samples: `shard_data` averages gradients so. All ranks call it.

    Args:
        sp: how many exchange heads; they divide the heads.
        cp: how many are in a ring; `2 * cp` and `cp * sp` divide a sample's tokens.

    Raises:
        ScheduleError: not the root; no `dp` axis, or one that such groups do not divide; called before; a model that
            attends by code of its own, or in a ring by more than softmax(Q K') V; heads that the ranks do not divide.

    Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509); Liu et al., Ring Attention (arXiv:2310.01889); both together:
    Fang and Zhao, USP (arXiv:2405.07719).
    """
    label = f"cut_sequence on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: sequences are cut for the whole model, so call it on the root's schedule")
    for name, degree in (("sp", sp), ("cp", cp)):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ScheduleError(f"{label}: {name} must be a whole number of at least 1, but is {degree!r}")
    along = axis_of(sch.mesh, "dp")
    if sp * cp < 2 or along is None or along.size % (sp * cp):
        given = "there is none" if along is None else f"has {along.size} ranks"
        raise ScheduleError(
            f"{label}: the mesh's dp axis must be of groups of cp * sp ranks, two or more, but {given} and cp * sp is "
            f"{cp} * {sp}"
        )
    if layers_of(sch.module, CutSequence):
        raise ScheduleError(f"{label}: sequences are cut once, and they already are")
    tensor = axis_of(sch.mesh, "tp")
    tp = 1 if tensor is None else tensor.size
    if why := obstacle(sch.module, sp, cp, tp):
        raise ScheduleError(f"{'sp' if cp == 1 else 'cp' if sp == 1 else 'sp and cp'}: {why}")
    axes = _axes(sch.mesh, {"cp": cp, "sp": sp}, along)
    sharing = SequenceShards(sp=sp, cp=cp, rank=along.rank % (sp * cp))
    cut(sch.module, sharing, sp=axes.get("sp"), cp=axes.get("cp"), tp=tp)


def _axes(mesh: object, degrees: dict[str, int], along: Axis) -> dict[str, Axis]:
    """The axes of the ranks that share samples, those of more than one rank."""
    sizes = {name: size for name, size in degrees.items() if size > 1}
    if isinstance(mesh, PlannedMesh):
        return {name: Axis(name, size, 0, along.group_name) for name, size in sizes.items()}
    made = divided(mesh, "dp", {"samples": along.size // prod(sizes.values()), **sizes})
    found = {name: axis_of(made, name) for name in sizes}
    return {name: Axis(name, each.size, each.rank, each.group_name) for name, each in found.items() if each is not None}
