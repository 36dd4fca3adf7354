"""What is asked of the data of a training."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ...base.errors import WorkloadError, unknown
from ...models.request import Asked

Packing = Literal["packed", "documents", "padded"]
TrainOn = Literal["all", "assistant"]
BYTES = "bytes"
"""The tokenizer that takes text by bytes."""
LARGEST_SHARE = 0.5
"""Of the samples, what may be held out."""


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """What is asked of the data of a training.

    Raises:
        WorkloadError: a field is not what it must be.
    """

    paths: Annotated[
        tuple[str, ...],
        Asked(
            "Text, JSON lines, Parquet, datasets folders or token files; repeatable.",
            flag="data",
            metavar="FILE",
            many=True,
        ),
    ] = ()
    """Files or folders: text (`.txt`, `.md`) and JSON lines (`.jsonl`, `.ndjson`, `.json`), either as it is or with `.gz`,
    Parquet, a folder of such or of Hugging Face `datasets`, or tokens: nanoGPT's `.bin`, the `.bin` and `.idx` of Megatron
    by either or their prefix."""
    tokenizer: Annotated[
        str | None,
        Asked("Folder of a Hugging Face tokenizer, or bytes.  [default: that of --from, else bytes]", metavar="DIR"),
    ] = None
    """Folder of a Hugging Face tokenizer; None or `bytes` takes text by bytes. Of a `.bin` it says which token ends a
    document."""
    field: Annotated[str, Asked("Column with the text, or the messages.", metavar="NAME")] = "text"
    """Column with the text of JSON lines, Parquet and datasets; a list of messages with `role` and `content`, or
    ShareGPT's `from` and `value`, there is a conversation, written as text by the tokenizer's chat template."""
    packing: Annotated[
        Packing | None,
        Asked(
            "packed, documents (which do not see each other) or padded.  [default: packed, padded for conversations]",
            metavar="NAME",
        ),
    ] = None
    """`packed`: samples are cut from all documents in a row. `documents`: the same, but no token sees or is predicted
    from another document. `padded`: a document a sample, cut and padded. None: `padded` for conversations, else `packed`."""
    train_on: Annotated[
        TrainOn | None,
        Asked("Tokens of conversations to train on: all, or the assistant's.  [default: assistant]", metavar="NAME"),
    ] = None
    """`assistant`: of conversations only what the assistant says is predicted. None: `assistant` for conversations, else
    `all`."""
    held_out: Annotated[float, Asked("Share of samples held out for evaluation.", type=float)] = 0.0
    """Share of the samples that is set apart for evaluation, from 0 to 0.5."""
    shuffle: Annotated[bool, Asked("Reorder samples in each epoch.")] = True
    """Whether each epoch has an order of its own; otherwise all have that of the data."""
    skip_bad_rows: Annotated[bool, Asked("Skip and count rows that cannot be read.")] = False
    """Whether rows of JSON lines, Parquet and datasets that cannot be read, or hold no text or conversation, are left out and
    counted; otherwise the first of them is refused."""
    seed: Annotated[int, Asked("Seed of weights, order and dropout.", type=range(1 << 63))] = 0
    """Of the order, and of what masked language models hide."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, str):
            raise WorkloadError(f"data must be a sequence of files or folders, but got {self.paths!r}")
        if not all(self.paths):
            raise WorkloadError(
                "the data must be files or folders, but one is an empty text; give a path, or leave it out"
            )
        if not self.field:
            raise WorkloadError("the field of the data must be the name of a column, but is empty; give field=text")
        if self.packing is not None and self.packing not in get_args(Packing):
            raise WorkloadError(unknown("packing", self.packing, get_args(Packing)))
        if self.train_on is not None and self.train_on not in get_args(TrainOn):
            raise WorkloadError(unknown("train_on", self.train_on, get_args(TrainOn)))
        if not 0 <= self.held_out <= LARGEST_SHARE:
            raise WorkloadError(
                f"held_out must be a share of the samples from 0 to {LARGEST_SHARE}, but is {self.held_out}"
            )
