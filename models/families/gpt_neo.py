"""GPT-Neo: GPT-2's layout, every other block with attention to a window."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """The blocks, global and local attention in turn."""
    return sch.select("transformer.h.*")


schedule = StandardSchedule(blocks)
