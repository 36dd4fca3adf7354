"""Ranks of a trial and their positions in the grid of stages, replicas and pieces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import UsageError, WorkloadError
from ..knobs.rules import GENERAL, RuleContext, refusal
from ..knobs.strategy import DEGREES, Strategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ..knobs.meaning import SequenceShards

AXES = ("pp", "dp", "tp")
"""Axes of the mesh, outermost first. Ranks that share a layer communicate the most, so they are neighbours and, with
ranks numbered host by host, on one host. Ranks that share a sequence come next: they are on the `dp` axis, where
groups of neighbours have the same samples, because for weights and gradients they are replicas like all others.
Within such a group the ranks that exchange heads are neighbours, and a ring connects these subgroups.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Position of this process in the grid of pipeline stages, replicas and pieces."""

    rank: int = 0
    """Global rank."""
    size: int = 1
    """Number of ranks, the product of the degrees."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas with their own samples."""
    sp: int = 1
    """Ranks that share each sequence by exchanging heads."""
    cp: int = 1
    """Ranks, or groups of ranks, that share each sequence in a ring."""
    tp: int = 1
    """Ranks that share each layer."""
    ep: int = 1
    """Neighbouring replicas that share the experts."""

    @staticmethod
    def of(config: Mapping[str, Any], rank: int = 0, size: int = 1) -> "World":
        """Returns the world of a configuration on `size` ranks. Without `dp`, it is size / (tp * sp * cp * pp).

        Raises:
            WorkloadError: a degree is below 1, or the product of the degrees is not the number of ranks.
        """
        try:
            degrees = Strategy.of({name: config[name] for name in (*DEGREES, "ep") if name in config}, devices=size)
        except UsageError as error:
            raise WorkloadError(str(error)) from None
        if reason := refusal(degrees, RuleContext(devices=size), GENERAL):
            raise WorkloadError(reason)
        if not 0 <= rank < size:
            raise WorkloadError(f"rank must be from 0 to {size - 1}, but is {rank}")
        return World(rank=rank, size=size, **{name: getattr(degrees, name) for name in (*DEGREES, "ep")})

    @property
    def replicas(self) -> int:
        """Number of ranks of the mesh's `dp` axis, which have the same weights."""
        return self.dp * self.sp * self.cp

    @property
    def replica(self) -> int:
        """Index on the `dp` axis."""
        return self.rank // self.tp % self.replicas

    @property
    def tp_rank(self) -> int:
        """Index of the piece of a layer."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Index of the share of the samples."""
        return self.replica // (self.sp * self.cp)

    @property
    def sharing(self) -> "SequenceShards":
        """Piece of the sequences."""
        from ..knobs.meaning import SequenceShards

        return SequenceShards(sp=self.sp, cp=self.cp, rank=self.replica % (self.sp * self.cp))

    @property
    def pp_rank(self) -> int:
        """Index of the stage."""
        return self.rank // (self.tp * self.replicas)

    def mesh(self, device: "torch.device", timeout_s: float | None = None) -> "DeviceMesh | None":
        """Returns a `DeviceMesh` with the axes of a size above 1, in the order of AXES; None for one rank.

        With several ranks `torch.distributed` must be initialised.

        Args:
            device: device of this rank.
            timeout_s: timeout of collectives of an axis, s; None leaves torch's default. An axis of all ranks is the
                group of all ranks, with that group's own timeout.
        """
        sizes = {name: self.replicas if name == "dp" else getattr(self, name) for name in AXES}
        names = tuple(name for name in AXES if sizes[name] > 1)
        if not names:
            return None
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if len(names) == 1:
            return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=names)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        ranks = torch.arange(self.size).reshape([sizes[name] for name in names])
        groups = []
        # All ranks create all groups, in the same order: creating one is a collective of the whole world.
        for axis, name in enumerate(names):
            lines = ranks.movedim(axis, -1).flatten(0, -2).tolist()
            # Groups made by `init_device_mesh` have torch's default timeout, regardless of that of the whole group.
            group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout, group_desc=f"mesh_{name}")
            groups.append(group)
        return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)
