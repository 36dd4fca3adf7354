"""T5: encoder and decoder, with position biases that the first block computes for all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base.errors import ScheduleError
from .standard import StandardSchedule, even_ends
from .tensor_parallel import Regions, column_parallel, row_parallel, sequence, vocabulary

if TYPE_CHECKING:
    from ...schedule import Schedule

EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


def blocks(sch: "Schedule") -> "list[Schedule]":
    """Returns the encoder's blocks, then the decoder's."""
    return [*sch.select("encoder.block.*"), *sch.select("decoder.block.*")]


def cut(sch: "Schedule", blocks: "Sequence[Schedule]", sequence_parallel: bool) -> None:
    """Cuts attention and its position bias by heads, the feed-forward parts by their inner features."""
    vocabulary(sch, EMBEDDINGS, "lm_head")
    for block in blocks:
        for layer in block["layer"]:
            cut_layer(layer, Regions(sequence_parallel))
    if sequence_parallel:
        for stack in ("encoder", "decoder"):
            norms = [f"layer.{index}.layer_norm" for index in range(3)]
            sequence(sch, sch.select(f"{stack}.block.*"), norms, f"{stack}.final_layer_norm")
    # Cross-attention in all blocks of the decoder reads the encoder's output.
    sch["encoder.final_layer_norm"].sync("bwd_pre", "all_reduce")


def cut_layer(layer: "Schedule", regions: Regions) -> None:
    """Cuts self-attention, cross-attention or the feed-forward part of a block."""
    for name in ("SelfAttention", "EncDecAttention"):
        if name in layer:
            for projection in ("q", "k", "v"):
                column_parallel(layer[name][projection])
            row_parallel(layer[name]["o"])
            if "relative_attention_bias" in layer[name]:
                layer[name]["relative_attention_bias"].shard("weight", axis=1)
            around(layer, layer[name], layer[name]["o"], regions)
    if "DenseReluDense" in layer:
        for name in ("wi", "wi_0", "wi_1"):
            if name in layer["DenseReluDense"]:
                column_parallel(layer["DenseReluDense"][name])
        row_parallel(layer["DenseReluDense.wo"])
        around(layer, layer["DenseReluDense"], layer["DenseReluDense.wo"], regions)


def around(layer: "Schedule", entry: "Schedule", last: "Schedule", regions: Regions) -> None:
    """Adds the communication of a region. Only the norm's output is summed: position biases are cut by heads."""
    entry.fork_rng()
    if regions.sequence_parallel:
        regions.around(entry, last, dropout=[layer["dropout"]])
    else:
        layer["layer_norm"].sync("bwd_pre", "all_reduce")
        last.sync("fwd_post", "all_reduce")


def stage_ends(sch: "Schedule", stages: int) -> "list[Schedule]":
    """Puts the decoder in the last stage and the encoder in all others, because each decoder block reads the
    encoder's output.
    """
    encoder = sch.select("encoder.block.*")
    if len(encoder) < stages - 1:
        raise ScheduleError(
            f"pp: the decoder needs its own stage, so {len(encoder)} encoder blocks remain for {stages - 1} stages"
        )
    return [*even_ends(encoder, stages - 1), encoder[-1]]


schedule = StandardSchedule(
    blocks,
    cut,
    stage_ends=stage_ends,
    no_runs="blocks of the decoder attend to what the encoder gives",
    no_stage_blocks="its decoder is in one stage",
)
