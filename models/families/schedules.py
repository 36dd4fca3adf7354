"""The schedule of each family: its own for those without a plan in transformers (GPT-2, BERT, OPT), one for all others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from ...base.errors import ScheduleError
from . import tp_plans
from .standard import StandardSchedule, even_ends
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel, sequence, vocabulary

if TYPE_CHECKING:
    from torch import nn

    from ...schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A cut region of a block, by paths from it: attention cut by heads, or a feed-forward part cut by its inner features."""

    entry: str
    """Module whose input starts the region."""
    columns: tuple[str, ...]
    """Projections that are cut along their output."""
    row: str
    """Projection that ends it, cut along its input."""
    dropout: tuple[str, ...] = ()
    """Dropout modules after its end."""
    parts: int = 1
    """Projections that are fused in each of `columns`."""
    sequence: int = 1
    """Dimension of the sequence; 0 if samples and positions are one dimension."""
    draws: bool = False
    """True if its entry draws random numbers for values of this rank's heads."""

    def cut(self, block: "Schedule", regions: Regions) -> None:
        for name in self.columns:
            column_parallel(block[name], parts=self.parts)
        row_parallel(block[self.row])
        if self.draws:
            block[self.entry].fork_rng()
        dropout = [block[name] for name in self.dropout]
        regions.around(block[self.entry], block[self.row], dropout=dropout, sequence=self.sequence)


def attention(entry: str, columns: tuple[str, ...], row: str, dropout: tuple[str, ...] = (), parts: int = 1) -> Region:
    """Returns the region of an attention module, whose projections are below it."""
    columns = tuple(f"{entry}.{name}" for name in columns)
    return Region(entry=entry, columns=columns, row=row, dropout=dropout, parts=parts, draws=True)


@dataclass(frozen=True, slots=True)
class CutIn:
    """Cuts a block into regions; not a closure, since a workload with its schedule is sent to other processes."""

    regions: tuple[Region, ...]

    def __call__(self, block: "Schedule", regions: Regions) -> None:
        for region in self.regions:
            region.cut(block, regions)


Q_K_V = ("q_proj", "k_proj", "v_proj")
GPT_MLP = Region(entry="mlp", columns=("mlp.c_fc",), row="mlp.c_proj", dropout=("mlp.dropout",))
CUT_BERT = CutIn(
    (
        attention("attention.self", ("query", "key", "value"), "attention.output.dense", ("attention.output.dropout",)),
        Region(entry="intermediate", columns=("intermediate.dense",), row="output.dense", dropout=("output.dropout",)),
    )
)
NORMS_OF_BERT = ("attention.output.LayerNorm", "output.LayerNorm")


def cut_opt(block: "Schedule", regions: Regions) -> None:
    attention("self_attn", Q_K_V, "self_attn.out_proj").cut(block, regions)
    Region(entry="fc1", columns=("fc1",), row="fc2", sequence=0).cut(block, regions)
    if regions.sequence_parallel:
        # The layer itself has dropout on activations, with another piece on each rank.
        block.fork_rng()


def cut_albert(block: "Schedule", regions: Regions) -> None:
    for name in ("attention.query", "attention.key", "attention.value"):
        # The attention module adds its input to its output, so each projection's gradient is summed separately.
        column_parallel(block[name])
        block[name].sync("bwd_post", "all_reduce")
    row_parallel(block["attention.dense"])
    block["attention.dense"].sync("fwd_post", "all_reduce")
    block["attention"].fork_rng()
    block["attention.output_dropout"].fork_rng(differ=False)
    Region(entry="ffn", columns=("ffn",), row="ffn_output").cut(block, regions)


def no_stages_of_albert(sch: "Schedule", stages: int) -> NoReturn:
    """Raises, because the shared layer would have to be on every rank."""
    layers = sch.module.config.num_hidden_layers
    raise ScheduleError(f"pp: the model uses one layer {layers} times, so its weights cannot be in {stages} stages")


def cut_wide_resnet(block: "Schedule", regions: Regions) -> None:
    """Cuts the first convolution and its norm by output channels, the second by input channels."""
    block["norm2"].shard(["weight", "bias"], axis=0)
    Region(entry="conv1", columns=("conv1",), row="conv2").cut(block, regions)


def _gpt(attention_region: Region) -> StandardSchedule:
    return StandardSchedule(
        "transformer.h.*",
        Cuts(
            block=CutIn((attention_region, GPT_MLP)),
            embedding="transformer.wte",
            head="lm_head",
            norms=("ln_1", "ln_2"),
            last="transformer.ln_f",
        ),
    )


def _bert(name: str, head: str) -> StandardSchedule:
    embedding = f"{name}.embeddings.word_embeddings"
    return StandardSchedule(
        f"{name}.encoder.layer.*", Cuts(block=CUT_BERT, embedding=embedding, head=head, norms=NORMS_OF_BERT)
    )


EMBEDDINGS_OF_T5 = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


def blocks_of_t5(sch: "Schedule") -> "list[Schedule]":
    """Returns the encoder's blocks, then the decoder's."""
    return [*sch.select("encoder.block.*"), *sch.select("decoder.block.*")]


def cut_t5(sch: "Schedule", blocks: "Sequence[Schedule]", sequence_parallel: bool) -> None:
    """Cuts attention and its position bias by heads, the feed-forward parts by their inner features."""
    vocabulary(sch, EMBEDDINGS_OF_T5, "lm_head")
    for block in blocks:
        for layer in block["layer"]:
            cut_layer_of_t5(layer, Regions(sequence_parallel))
    if sequence_parallel:
        for stack in ("encoder", "decoder"):
            norms = [f"layer.{index}.layer_norm" for index in range(3)]
            sequence(sch, sch.select(f"{stack}.block.*"), norms, f"{stack}.final_layer_norm")
    # Cross-attention in all blocks of the decoder reads the encoder's output.
    sch["encoder.final_layer_norm"].sync("bwd_pre", "all_reduce")


def cut_layer_of_t5(layer: "Schedule", regions: Regions) -> None:
    """Cuts self-attention, cross-attention or the feed-forward part of a block."""
    for name in ("SelfAttention", "EncDecAttention"):
        if name in layer:
            for projection in ("q", "k", "v"):
                column_parallel(layer[name][projection])
            row_parallel(layer[name]["o"])
            if "relative_attention_bias" in layer[name]:
                layer[name]["relative_attention_bias"].shard("weight", axis=1)
            around_layer_of_t5(layer, layer[name], layer[name]["o"], regions)
    if "DenseReluDense" in layer:
        for name in ("wi", "wi_0", "wi_1"):
            if name in layer["DenseReluDense"]:
                column_parallel(layer["DenseReluDense"][name])
        row_parallel(layer["DenseReluDense.wo"])
        around_layer_of_t5(layer, layer["DenseReluDense"], layer["DenseReluDense.wo"], regions)


def around_layer_of_t5(layer: "Schedule", entry: "Schedule", last: "Schedule", regions: Regions) -> None:
    """Adds the communication of a region. Only the norm's output is summed: position biases are cut by heads."""
    entry.fork_rng()
    if regions.sequence_parallel:
        regions.around(entry, last, dropout=[layer["dropout"]])
    else:
        layer["layer_norm"].sync("bwd_pre", "all_reduce")
        last.sync("fwd_post", "all_reduce")


def stage_ends_of_t5(sch: "Schedule", stages: int) -> "list[Schedule]":
    """Puts the decoder in the last stage and the encoder in all others, because each decoder block reads the
    encoder's output.
    """
    encoder = sch.select("encoder.block.*")
    if len(encoder) < stages - 1:
        raise ScheduleError(
            f"pp: the decoder needs its own stage, so {len(encoder)} encoder blocks remain for {stages - 1} stages"
        )
    return [*even_ends(encoder, stages - 1), encoder[-1]]


SCHEDULES: Mapping[str, StandardSchedule] = {
    "albert": StandardSchedule(
        "albert.encoder.albert_layer_groups.*.albert_layers.*",
        Cuts(block=cut_albert, embedding="albert.embeddings.word_embeddings", head="predictions.decoder"),
        stage_ends=no_stages_of_albert,
        no_sequence_parallel="the attention module contains the residual too, and takes its sizes from the whole sequence",
        no_runs="it uses one layer several times",
    ),
    "bert": _bert("bert", "cls.predictions.decoder"),
    "gpt2": _gpt(attention("attn", ("c_attn",), "attn.c_proj", ("attn.resid_dropout",), parts=3)),
    # Its attention is windowed in every other block.
    "gpt_neo": _gpt(attention("attn.attention", Q_K_V, "attn.attention.out_proj", ("attn.attention.resid_dropout",))),
    "opt": StandardSchedule(
        "model.decoder.layers.*",
        Cuts(
            block=cut_opt,
            embedding="model.decoder.embed_tokens",
            head="lm_head",
            norms=("self_attn_layer_norm", "final_layer_norm"),
            last="model.decoder.final_layer_norm",
        ),
        late=("model.decoder.final_layer_norm", "model.decoder.project_out"),
    ),
    "roberta": _bert("roberta", "lm_head.decoder"),
    "xlm-roberta": _bert("roberta", "lm_head.decoder"),
    "t5": StandardSchedule(
        blocks_of_t5,
        cut_t5,
        stage_ends=stage_ends_of_t5,
        no_runs="blocks of the decoder attend to what the encoder gives",
        no_stage_blocks="its decoder is in one stage",
    ),
    "vit": StandardSchedule(
        "vit.layers.*",
        Cuts(
            block=CutIn(
                (
                    attention("attention", Q_K_V, "attention.o_proj"),
                    Region(entry="mlp", columns=("mlp.fc1",), row="mlp.fc2"),
                )
            )
        ),
        no_sequence_parallel="patches and the class token are an odd number, which no ranks divide",
    ),
    "wide_resnet": StandardSchedule(
        "blocks.*",
        Cuts(block=cut_wide_resnet),
        no_sequence_parallel="images are not sequences of tokens",
        no_runs="its norms take the mean of a micro-batch",
    ),
}
"""Schedules by model type, as transformers names it. Types with plans in transformers (Llama, Qwen, Mistral, Mixtral, GPT-NeoX
and about a hundred more) need none."""

SHARE_OF_LARGEST = 0.25
"""Lists of blocks with at least this share of the largest list's parameters count too: the decoder beside an encoder, the
stages of a convolutional network.
"""


def repeated_blocks(sch: "Schedule") -> "list[Schedule]":
    """Returns the members of the largest `nn.ModuleList` or `nn.Sequential` of modules of one type, and of similar
    lists elsewhere in the model. Modules without children are not blocks. Empty if nothing is repeated.
    """
    lists = list(_lists(sch, sch.module))
    largest = max((size for _, size in lists), default=0)
    return [block for members, size in lists if size >= SHARE_OF_LARGEST * largest for block in members]


def _lists(sch: "Schedule", module: "nn.Module") -> "Iterator[tuple[list[Schedule], int]]":
    """Yields the outermost lists of blocks below a module, with their number of parameters."""
    from torch import nn

    for name, child in module.named_children():
        schedule_of_child = sch[name]
        members = list(child.children())
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1:
            same_type = all(type(member) is type(members[0]) for member in members)
            distinct = len({id(member) for member in members}) == len(members)
            if same_type and distinct and any(True for _ in members[0].children()):
                yield (
                    [schedule_of_child[index] for index in range(len(members))],
                    sum(parameter.numel() for parameter in child.parameters()),
                )
                continue
        yield from _lists(schedule_of_child, child)


generic_schedule = StandardSchedule(repeated_blocks, tp_plans.cut, stage_ends=tp_plans.stage_ends)
"""Any model: finds repeated blocks by their repetition, and uses transformers' parallelism plans."""


def schedule_of(model_type: str) -> StandardSchedule:
    """Returns the schedule of a family; for those without one of their own the one that follows transformers' plans."""
    return SCHEDULES.get(model_type, generic_schedule)
