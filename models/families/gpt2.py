"""GPT-2."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads (q, k and v are fused in one weight), the feed-forward part by its inner features."""
    column_parallel(block["attn.c_attn"], parts=3)
    row_parallel(block["attn.c_proj"])
    block["attn"].fork_rng()
    regions.around(block["attn"], block["attn.c_proj"], dropout=[block["attn.resid_dropout"]])
    column_parallel(block["mlp.c_fc"])
    row_parallel(block["mlp.c_proj"])
    regions.around(block["mlp"], block["mlp.c_proj"], dropout=[block["mlp.dropout"]])


schedule = StandardSchedule(
    "transformer.h.*",
    Cuts(
        block=cut,
        embedding="transformer.wte",
        head="lm_head",
        norms=("ln_1", "ln_2"),
        last="transformer.ln_f",
    ),
)
