"""Any model: finds repeated blocks by their repetition, and uses transformers' parallelism plans."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import tp_plans
from .standard import StandardSchedule

if TYPE_CHECKING:
    from torch import nn

    from ...schedule import Schedule

SHARE_OF_LARGEST = 0.25
"""Lists of blocks with at least this share of the largest list's parameters count too: the decoder beside an encoder, the
stages of a convolutional network.
"""


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Returns the members of the largest `nn.ModuleList` or `nn.Sequential` of modules of one type, and of similar
    lists elsewhere in the model. Modules without children are not blocks. Empty if nothing is repeated.
    """
    lists = list(_lists(sch, sch.module))
    largest = max((size for _, size in lists), default=0)
    return [block for members, size in lists if size >= SHARE_OF_LARGEST * largest for block in members]


def _lists(sch: "Schedule", module: "nn.Module") -> "Iterator[tuple[list[Schedule], int]]":
    """Yields the outermost lists of blocks below a module, with their number of parameters."""
    from torch import nn

    for name, child in module.named_children():
        schedule_of_child = sch[name]
        members = list(child.children())
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1:
            same_type = all(type(member) is type(members[0]) for member in members)
            distinct = len({id(member) for member in members}) == len(members)
            if same_type and distinct and any(True for _ in members[0].children()):
                yield (
                    [schedule_of_child[index] for index in range(len(members))],
                    sum(parameter.numel() for parameter in child.parameters()),
                )
                continue
        yield from _lists(schedule_of_child, child)


schedule = StandardSchedule(blocks, tp_plans.cut, stage_ends=tp_plans.stage_ends)
