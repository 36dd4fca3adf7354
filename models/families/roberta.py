"""RoBERTa and XLM-RoBERTa: BERT's blocks under other names."""

from typing import TYPE_CHECKING

from .bert import cut
from .standard import StandardSchedule
from .tensor_parallel import Cuts

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Returns attention and feed-forward, each followed by its norm."""
    return sch.select("roberta.encoder.layer.*")


schedule = StandardSchedule(
    blocks,
    Cuts(
        block=cut,
        embedding="roberta.embeddings.word_embeddings",
        head="lm_head.decoder",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ),
)
