"""ALBERT: one layer, used repeatedly."""

from typing import TYPE_CHECKING, NoReturn

from ...base.errors import ScheduleError
from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts attention by heads, the feed-forward part by its inner features."""
    for name in ("attention.query", "attention.key", "attention.value"):
        # The attention module adds its input to its output, so each projection's gradient is summed separately.
        column_parallel(block[name])
        block[name].sync("bwd_post", "all_reduce")
    row_parallel(block["attention.dense"])
    block["attention.dense"].sync("fwd_post", "all_reduce")
    block["attention"].fork_rng()
    block["attention.output_dropout"].fork_rng(differ=False)
    column_parallel(block["ffn"])
    row_parallel(block["ffn_output"])
    regions.around(block["ffn"], block["ffn_output"])


def no_stages(sch: "Schedule", stages: int) -> NoReturn:
    """Raises, because the shared layer would have to be on every rank."""
    layers = sch.module.config.num_hidden_layers
    raise ScheduleError(f"pp: the model uses one layer {layers} times, so its weights cannot be in {stages} stages")


schedule = StandardSchedule(
    "albert.encoder.albert_layer_groups.*.albert_layers.*",
    Cuts(block=cut, embedding="albert.embeddings.word_embeddings", head="predictions.decoder"),
    stage_ends=no_stages,
    no_sequence_parallel="the attention module contains the residual too, and takes its sizes from the whole sequence",
    no_runs="it uses one layer several times",
)
