"""Llama, and what shares its layout: Mistral, Qwen 2 and 3."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Decoder layers."""
    return sch.select("model.layers.*")


schedule = StandardSchedule(blocks)
