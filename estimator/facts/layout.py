"""Where a model's repeated blocks are, and what tensor parallelism divides of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...base.errors import ScheduleError
from ...models import Workload
from ...models.families import StandardSchedule, generic_schedule
from ...models.skeleton import skeleton
from .step_trace import Product

if TYPE_CHECKING:
    from ...schedule import Schedule

_TRIED_RANKS = (2, 3, 5)
"""Tensor-parallel degrees at which a schedule is asked what it cuts; 25 heads, as of gpt2-xl, want the 5."""


@dataclass(frozen=True)
class Layout:
    """Where a model's repeated blocks are, and what tensor parallelism divides."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks."""
    cuts: Mapping[str, int] | None
    """Dimension that is cut of each parameter that is; None where nobody has a plan."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""

    @classmethod
    def of(cls, workload: Workload) -> "Layout":
        """Asks the workload's schedule.

        Raises:
            WorkloadError: the model cannot be built.
        """
        from ...schedule import create_schedule

        sch = create_schedule(skeleton(workload, workload.probe))
        schedule = workload.schedule if isinstance(workload.schedule, StandardSchedule) else generic_schedule
        blocks = tuple(each.path for each in schedule.blocks(sch))
        cuts = _cuts(schedule, sch)
        notes = [] if cuts is not None else ["tensor parallelism: assumed to divide the products as Megatron does"]
        return cls(blocks, cuts, notes)

    def split(self, product: Product, earlier: Sequence[Product], attended: bool, width: int) -> str:
        """What tensor parallelism divides of a product: `column`, `row` or `none`."""
        if not product.weight:
            return "none"
        if self.cuts is not None:
            dim = self.cuts.get(product.weight)
            if dim is None:
                return "none"
            dim -= product.stacked  # counts the experts
            return "column" if dim == (0 if product.transposed else 1) else "row"
        # Megatron's way (arXiv:1909.08053): into a segment by columns, out of it by rows.
        if not width or width not in (product.k, product.n):
            return "none"
        return "row" if attended or product.k != width else "column"


def _cuts(schedule: StandardSchedule, sch: "Schedule") -> dict[str, int] | None:
    from ...schedule import create_schedule
    from ...schedule.parallel.collectives import PlannedMesh
    from ...schedule.parallel.partition import meta_copy
    from ...schedule.parallel.sharding import shards_of

    if schedule.tensor_parallel is None:
        return None
    for ranks in _TRIED_RANKS:
        tried = create_schedule(meta_copy(sch.tree.module), PlannedMesh(tp=ranks))
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
