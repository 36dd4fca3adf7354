"""What is known of a workload's mixtures of experts before it is trained."""

from typing import TYPE_CHECKING

from .skeleton import skeleton
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn


def experts_of(workload: Workload) -> tuple[int, ...]:
    """The numbers of experts that the mixtures of a workload's model have, each once, ascending; empty for none."""
    return experts_in(skeleton(workload))


def experts_in(model: "nn.Module") -> tuple[int, ...]:
    """The same of a model."""
    from ..schedule.parallel.experts import mixtures_of, num_experts

    return tuple(sorted({num_experts(each) for each in mixtures_of(model).values()}))
