"""OPT."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads, the feed-forward part by its inner features."""
    attention = block["self_attn"]
    for name in ("q_proj", "k_proj", "v_proj"):
        column_parallel(attention[name])
    row_parallel(attention["out_proj"])
    attention.fork_rng()
    regions.around(attention, attention["out_proj"])
    column_parallel(block["fc1"])
    row_parallel(block["fc2"])
    # Samples and positions are one dimension here.
    regions.around(block["fc1"], block["fc2"], sequence=0)
    if regions.sequence_parallel:
        # The layer itself has dropout on activations, with another piece on each rank.
        block.fork_rng()


schedule = StandardSchedule(
    "model.decoder.layers.*",
    Cuts(
        block=cut,
        embedding="model.decoder.embed_tokens",
        head="lm_head",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        last="model.decoder.final_layer_norm",
    ),
    late=("model.decoder.final_layer_norm", "model.decoder.project_out"),
)
