"""Llama, and what shares its layout: Mistral, Qwen 2 and 3."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Regions, TransformerCuts, columns, rows

if TYPE_CHECKING:
    from ...schedule import Schedule


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Decoder layers."""
    return sch.select("model.layers.*")


def cut(block: "Schedule", regions: Regions) -> None:
    """Attention by heads (query and key-value heads alike), the gated MLP by its inner features."""
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        columns(block[name])
    rows(block["self_attn.o_proj"])
    block["self_attn"].fork_rng()
    regions.around(block["self_attn"], block["self_attn.o_proj"])
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        columns(block[name])
    rows(block["mlp.down_proj"])
    regions.around(block["mlp"], block["mlp.down_proj"])


schedule = StandardSchedule(
    blocks,
    TransformerCuts(
        block=cut,
        embedding="model.embed_tokens",
        head="lm_head",
        norms=("input_layernorm", "post_attention_layernorm"),
        last="model.norm",
    ),
)
