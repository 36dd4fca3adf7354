"""GPT-2."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Attention and feed-forward with their norms in front."""
    return sch.select("transformer.h.*")


schedule = StandardSchedule(blocks)
