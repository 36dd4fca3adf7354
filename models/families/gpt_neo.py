"""GPT-Neo: GPT-2's layout, with windowed attention in every other block."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads, the feed-forward part by its inner features."""
    attention = block["attn.attention"]
    for name in ("q_proj", "k_proj", "v_proj"):
        column_parallel(attention[name])
    row_parallel(attention["out_proj"])
    attention.fork_rng()
    regions.around(attention, attention["out_proj"], dropout=[attention["resid_dropout"]])
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
