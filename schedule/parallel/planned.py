"""A mesh of ranks that need not exist, on which a schedule can be tried without being built."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Group:
    count: int
    group_name: str = "planned"

    def size(self) -> int:
        return self.count


class PlannedMesh:
    """Stands for a DeviceMesh of which this is the first rank: `PlannedMesh(pp=2, tp=4)`.

    Primitives that ask for sizes and refuse what these do not allow work on it; `build` does not.
    """

    def __init__(self, **axes: int) -> None:
        self.axes = axes
        self.mesh_dim_names = tuple(axes)

    def get_group(self, name: str) -> _Group:
        """Something that has the size of the axis."""
        return _Group(self.axes[name])

    def get_local_rank(self, name: str) -> int:
        """Always the first."""
        return 0
