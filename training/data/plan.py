"""What is asked of the data of a training."""

from dataclasses import dataclass
from typing import Literal, get_args

from ...errors import WorkloadError, unknown

Packing = Literal["packed", "documents", "padded"]
TrainOn = Literal["all", "assistant"]
LARGEST_SHARE = 0.5
"""Of the samples, what may be held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """What is asked of the data of a training.

    Raises:
        WorkloadError: a field is not what it must be.
    """

    paths: tuple[str, ...]
    """Files or folders: text (`.txt`, `.md`), JSON lines (`.jsonl`, `.ndjson`, `.json`), Parquet, a folder of such or of
    Hugging Face `datasets`, or tokens: nanoGPT's `.bin`, the `.bin` and `.idx` of Megatron by either or their prefix."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer; None takes text by bytes. Of a `.bin` it says which token ends a document."""
    field: str = "text"
    """Column with the text of JSON lines, Parquet and datasets; a list of messages with `role` and `content` there is a
    conversation, written as text by the tokenizer's chat template."""
    packing: Packing | None = None
    """`packed`: samples are cut from all documents in a row. `documents`: the same, but no token sees or is predicted
    from another document. `padded`: a document a sample, cut and padded. None: `padded` for conversations, else `packed`."""
    train_on: TrainOn | None = None
    """`assistant`: of conversations only what the assistant says is predicted. None: `assistant` for conversations, else
    `all`."""
    held_out: float = 0.0
    """Share of the samples that is set apart for evaluation, from 0 to 0.5."""
    shuffle: bool = True
    """Whether each epoch has an order of its own; otherwise all have that of the data."""
    seed: int = 0
    """Of the order, and of what masked language models hide."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not self.paths:
            raise WorkloadError(f"data needs at least one file or folder, but got {self.paths!r}")
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
