"""OPT."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Decoder layers."""
    return sch.select("model.decoder.layers.*")


schedule = StandardSchedule(blocks)
