"""Repeated blocks of a model and their division by tensor parallelism."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...base.errors import ScheduleError
from ...models import Workload
from ...models.families import StandardSchedule, generic_schedule
from ...models.skeleton import short_copy, skeleton, stand_ins_for
from .step_trace import Product

if TYPE_CHECKING:
    from torch import nn

    from ...schedule import Schedule

_TRIED_RANKS = (2, 3, 5)
"""Tensor-parallel degrees for which a schedule's plan is queried; 25 heads, as in gpt2-xl, need the 5."""


@dataclass(frozen=True)
class Layout:
    """Repeated blocks of a model and their division by tensor parallelism."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks."""
    cuts: Mapping[str, int] | None
    """Sharded dimension of each sharded parameter; None without a plan."""
    notes: list[str] = field(default_factory=list)
    """Assumptions."""

    @classmethod
    def of(cls, workload: Workload) -> "Layout":
        """Queries the workload's schedule.

        Raises:
            WorkloadError: the model cannot be built.
        """
        from ...schedule import create_schedule

        sch = create_schedule(skeleton(workload, workload.probe))
        schedule = workload.schedule if isinstance(workload.schedule, StandardSchedule) else generic_schedule
        blocks = tuple(block.path for block in schedule.blocks(sch))
        cuts = _cuts(schedule, sch, blocks)
        notes = [] if cuts is not None else ["tensor parallelism: assumed to divide the products as Megatron does"]
        return cls(blocks, cuts, notes)

    def split(self, product: Product, attended: bool, width: int) -> str:
        """Dimension of a product that tensor parallelism divides: `column`, `row` or `none`."""
        if not product.weight:
            return "none"
        if self.cuts is not None:
            dim = self.cuts.get(product.weight)
            if dim is None:
                return "none"
            dim -= product.stacked  # without the dimension of experts
            return "column" if dim == (0 if product.transposed else 1) else "row"
        # As in Megatron (arXiv:1909.08053): columns at the start of a segment, rows at its end.
        if not width or width not in (product.k, product.n):
            return "none"
        return "row" if attended or product.k != width else "column"


def _cuts(schedule: StandardSchedule, sch: "Schedule", blocks: tuple[str, ...]) -> dict[str, int] | None:
    """Sharded dimension of each sharded parameter. Equal blocks are sharded alike, so a copy with a few of each kind is tried
    first."""
    if schedule.tensor_parallel is None:
        return None
    twins = stand_ins_for(sch.tree.module, blocks)
    if twins:
        short, remaining_paths = short_copy(sch.tree.module, blocks)
        with suppress(ScheduleError, LookupError, AttributeError):  # also for a missing block
            dims = _sharded(schedule, short)
            if dims is not None:
                return dims | {
                    path + name.removeprefix(twin): dim
                    for path, twin in twins.items()
                    if path not in remaining_paths
                    for name, dim in dims.items()
                    if name.startswith(f"{twin}.")
                }
    return _sharded(schedule, sch.tree.module)


def _sharded(schedule: StandardSchedule, model: "nn.Module") -> dict[str, int] | None:
    """Sharded dimension of each sharded parameter of a model; None if no degree that is tried divides it."""
    from ...schedule import create_schedule
    from ...schedule.parallel.collectives import PlannedMesh
    from ...schedule.parallel.partition import meta_copy
    from ...schedule.parallel.sharding import shards_of

    for ranks in _TRIED_RANKS:
        tried = create_schedule(meta_copy(model), PlannedMesh(tp=ranks))
        try:
            schedule(tried, {"tp": ranks})
        except ScheduleError:
            continue
        return {
            f"{path}.{name}" if path else name: shard.dim
            for path, module in tried.tree.module.named_modules()
            for name, shard in shards_of(module).items()
        }
    return None
