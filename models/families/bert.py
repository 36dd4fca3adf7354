"""BERT."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads, the feed-forward part by its inner features."""
    for name in ("query", "key", "value"):
        column_parallel(block[f"attention.self.{name}"])
    row_parallel(block["attention.output.dense"])
    block["attention.self"].fork_rng()
    regions.around(
        block["attention.self"],
        block["attention.output.dense"],
        dropout=[block["attention.output.dropout"]],
    )
    column_parallel(block["intermediate.dense"])
    row_parallel(block["output.dense"])
    regions.around(block["intermediate"], block["output.dense"], dropout=[block["output.dropout"]])


schedule = StandardSchedule(
    "bert.encoder.layer.*",
    Cuts(
        block=cut,
        embedding="bert.embeddings.word_embeddings",
        head="cls.predictions.decoder",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ),
)
