"""Vision Transformer."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads, the feed-forward part by its inner features."""
    for name in ("q_proj", "k_proj", "v_proj"):
        column_parallel(block["attention"][name])
    row_parallel(block["attention.o_proj"])
    block["attention"].fork_rng()
    regions.around(block["attention"], block["attention.o_proj"])
    column_parallel(block["mlp.fc1"])
    row_parallel(block["mlp.fc2"])
    regions.around(block["mlp"], block["mlp.fc2"])


schedule = StandardSchedule(
    "vit.layers.*",
    Cuts(block=cut),
    no_sequence_parallel="patches and the class token are an odd number, which no ranks divide",
)
