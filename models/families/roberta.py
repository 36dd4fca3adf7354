"""RoBERTa and XLM-RoBERTa: BERT's layout under another name."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Attention and feed-forward, each followed by its norm."""
    return sch.select("roberta.encoder.layer.*")


schedule = StandardSchedule(blocks)
