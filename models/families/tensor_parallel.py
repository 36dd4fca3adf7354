"""Cuts a transformer over the `tp` axis: regions within its blocks, the vocabulary, the sequence between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...schedule import Schedule


@dataclass(frozen=True, slots=True)
class Regions:
    """Communication around cut regions. A region starts and ends where ranks have the whole input and output; with
    `sequence_parallel`, a piece of the sequence each (Korthikanti et al., 2022).
    """

    sequence_parallel: bool = False
    """True if ranks have pieces of the sequence between regions."""

    def around(
        self,
        entry: "Schedule",
        last: "Schedule",
        dropout: "Sequence[Schedule]" = (),
        sequence: int = 1,
    ) -> None:
        """Adds the communication of one region.

        Args:
            entry: module whose input starts the region; everything that it computes from it is cut.
            last: projection that ends it with partial sums.
            dropout: dropout modules after the region's end.
            sequence: dimension of the sequence; 0 if samples and positions are one dimension.
        """
        if self.sequence_parallel:
            entry.sync("fwd_pre", "all_gather", axis=sequence)
            last.sync("fwd_post", "reduce_scatter", axis=sequence)
        else:
            entry.sync("bwd_post", "all_reduce")
            last.sync("fwd_post", "all_reduce")
        for module in dropout:
            # Each rank has the whole output, or another piece of the sequence.
            module.fork_rng(differ=self.sequence_parallel)


def column_parallel(module: "Schedule", parts: int = 1, gathered: bool = False) -> None:
    """Cuts a linear layer along its output, including the bias; `parts` projections are fused in it.

    In an adapted layer (LoRA) the inner half of the adapter stays whole and sums its gradient over all ranks.

    Args:
        gathered: its output is gathered directly after it, so that all heads are present around it.
    """
    if is_adapted(module):
        column_parallel(module["base_layer"], parts, gathered)
        for inner, outer in _adapters(module):
            inner.sync("bwd_post", "all_reduce", on="parameters")
            column_parallel(outer, parts, gathered)
        return
    module.shard("weight", axis=_axes(module)[0], parts=parts, gathered=gathered)
    if module.module.bias is not None:
        module.shard("bias", axis=0, parts=parts, gathered=gathered)


def row_parallel(module: "Schedule") -> None:
    """Cuts a linear layer along its input: its output is a partial sum.

    In an adapted layer (LoRA) the outer half of the adapter stays whole: it maps partial sums to partial sums.
    """
    if is_adapted(module):
        row_parallel(module["base_layer"])
        for inner, outer in _adapters(module):
            row_parallel(inner)
            outer.sync("bwd_post", "all_reduce", on="parameters")
        return
    module.shard("weight", axis=_axes(module)[1])


def is_adapted(module: "Schedule") -> bool:
    """True for a layer with an adapter of peft."""
    return "base_layer" in module and "lora_A" in module


def _adapters(module: "Schedule") -> "list[tuple[Schedule, Schedule]]":
    """Inner and outer halves of a layer's adapters."""
    return [(module[f"lora_A.{name}"], module[f"lora_B.{name}"]) for name in module.module.lora_A]


def _axes(module: "Schedule") -> tuple[int, int]:
    # GPT-2's Conv1D stores its weight transposed.
    return (1, 0) if type(module.module).__name__ == "Conv1D" else (0, 1)


def vocabulary(sch: "Schedule", embeddings: Sequence[str], head: str) -> None:
    """Cuts embeddings (tied to each other if there are several) and the head over the vocabulary.

    The vocabulary is padded with zeros to a multiple of the ranks; the loss is computed from the pieces.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    weight = sch[embeddings[0]].module.weight
    tied = weight is sch[head].module.weight
    sch[embeddings[0]].shard("weight", axis=0, tied=tied or len(embeddings) > 1, pad=True)
    for name in embeddings:
        sch[name].sync("fwd_post", "all_reduce")
    if not tied:
        sch[head].shard("weight", axis=0, pad=True)
    if sch[head].module.bias is not None:
        # BERT has it at two places.
        sch[head].shard("bias", axis=0, tied=True, pad=True)
    sch[head].sync("bwd_post", "all_reduce").parallel_loss()


def sequence(sch: "Schedule", blocks: "Sequence[Schedule]", norms: Sequence[str], last: str) -> None:
    """Cuts the sequence from the first block to the last module before the head.

    Args:
        norms: modules of a block that compute on pieces of the sequence with whole weights.
        last: norm after the blocks; empty if each block ends in its own.
    """
    blocks[0].sync("fwd_pre", "scatter", axis=1)
    for block in blocks:
        for name in norms:
            if name in block:
                block[name].sync("bwd_post", "all_reduce", on="parameters")
    if last:
        sch[last].sync("bwd_post", "all_reduce", on="parameters")
    (sch[last] if last else blocks[-1]).sync("fwd_post", "all_gather", axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Cuts blocks, embedding and head of a model; called with the model's schedule."""

    block: "Callable[[Schedule, Regions], None]"
    embedding: str = ""
    """Path of the token embedding; empty if there is none to cut."""
    head: str = ""
    """Path of the projection to the vocabulary."""
    norms: tuple[str, ...] = ()
    """Norms of a block outside its regions."""
    last: str = ""
    """Norm after the blocks; empty if each block ends in its own."""

    def __call__(self, sch: "Schedule", blocks: "Sequence[Schedule]", sequence_parallel: bool) -> None:
        if self.embedding:
            vocabulary(sch, [self.embedding], self.head)
        for block in blocks:
            self.block(block, Regions(sequence_parallel))
        if sequence_parallel:
            sequence(sch, blocks, self.norms, self.last if self.last in sch else "")
