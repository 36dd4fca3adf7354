"""BERT."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Attention and feed-forward, each followed by its norm."""
    return sch.select("bert.encoder.layer.*")


schedule = StandardSchedule(blocks)
