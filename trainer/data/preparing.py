"""Prepares samples from a request: reads, tokenises and checks the data once, then maps it into memory."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ...models.data import Task, window
from .corpus import Encoder, RowKind, Source, encoded_tokens, encoder_of, find_sources, read_rows, tokenizer_digest
from .order import BYTES, DataPlan, Split
from .samples import SampleLayout, Samples, StoreInfo, TokenStore, made_once, usable_rows, write_tokens

if TYPE_CHECKING:
    import datasets

FORMAT = 5
"""Version of the cache, which changes if the same files give other tokens."""
BATCH = 64
"""Rows that are tokenised at once: enough for all threads of a fast tokenizer."""
LINES = 4096
"""Lines of a text file that are tokenised at once, as one text."""
OnRead = Callable[[float], None]
"""Receives the share of the data that is read, from 0 to 1."""


def prepare(
    plan: DataPlan,
    *,
    seq_len: int,
    task: Task,
    vocab_size: int,
    cache: Path,
    pad_id: int | None = None,
    on_read: OnRead = lambda share: None,
) -> Samples:
    """Returns the samples of a plan.

    The data is tokenised into a folder of the cache, once: other processes with the same request wait for the first,
    and later ones find the result.

    Args:
        seq_len: tokens of a sample; for sequence to sequence, of its input and of its output each.
        cache: a folder, on a disk that all ranks share or on one of each host.
        pad_id: padding token of the model; None for the tokenizer's.
        on_read: called now and then with the progress.

    Raises:
        WorkloadError: the data cannot be read, is empty, shorter than a sample, not UTF-8, of another vocabulary, or
            the plan does not suit it or the task.
        StudyError: the cache cannot be written.
        MissingDependency: the package that reads such files is not installed.
    """
    _check_task(plan, task)
    store = TokenStore(_tokens(plan, find_sources(plan.paths), vocab_size, cache, on_read))
    about = store.about
    if about.largest >= vocab_size:
        raise WorkloadError(
            f"{plan.paths[0]}: the data has token {about.largest} (tokenizer: {plan.tokenizer or BYTES}), but the model's "
            f"vocabulary has {vocab_size}; they do not match"
        )
    fills = [fill for fill in (pad_id, about.pad_id, about.end_id, 0) if fill is not None and 0 <= fill < vocab_size]
    layout = SampleLayout(store=store, packing=plan.packing, length=window(task, seq_len), pad_id=fills[0])
    usable = usable_rows(layout, task)
    count = layout.num_rows if usable is None else len(usable)
    _check_size(plan, layout, count)
    split = Split.of(count, plan.held_out)
    if plan.held_out and not split.evaluation:
        raise WorkloadError(
            f"{plan.paths[0]} has one sample of {layout.length} tokens, so none can be held out; give more data or "
            "held_out=0"
        )
    return Samples(
        plan=plan, task=task, vocab_size=vocab_size, pad_id=pad_id, layout=layout, usable=usable, split=split
    )


def _check_task(plan: DataPlan, task: Task) -> None:
    if task == "image":
        raise WorkloadError(
            "data files contain text or tokens, but the model classifies images; give its batches by --workload"
        )
    if task == "seq2seq" and plan.packing == "padded":
        raise WorkloadError(
            "packing=padded makes a sample of a document, but sequence to sequence predicts what follows a text from it; "
            "give packing=packed"
        )


def _check_size(plan: DataPlan, layout: SampleLayout, count: int) -> None:
    tokens, length = layout.store.about.tokens, layout.length
    subject = plan.paths[0] if len(plan.paths) == 1 else f"the data in {', '.join(plan.paths)}"
    if layout.packing != "padded" and tokens < length:
        raise WorkloadError(
            f"{subject} is too short: a sample has {length} tokens, but the data has {tokens}; give more data or a smaller "
            "sequence length"
        )
    if not count:
        raise WorkloadError(
            f"{subject} has nothing to train on: in none of {layout.num_rows} samples of {length} tokens is there a token to "
            "predict; give a larger sequence length"
        )


def _tokens(plan: DataPlan, sources: list[Source], vocab_size: int, cache: Path, on_read: OnRead) -> Path:
    """Returns the folder of the tokens, and creates it if necessary."""
    stamps = _stamps(sources)
    wanted = {
        "format": FORMAT,
        "sources": stamps,
        "tokenizer": tokenizer_digest(plan.tokenizer),
        "field": plan.field,
    }

    def make(folder: Path) -> StoreInfo:
        encoded_folder = folder / "rows"
        encoded_folder.mkdir()
        encoder = encoder_of(plan.tokenizer)
        with _without_progress_bars():
            read = [(source, *read_rows(source, plan.field, folder / "raw")) for source in sources]
            kinds = {kind for _, _, kind in read}
            _check_kinds(plan, kinds, vocab_size)
            total = max(1, sum(len(rows) for _, rows, _ in read))
            done = 0
            encoded_rows = []
            for number, (source, rows, kind) in enumerate(read):
                encode = partial(_encoded, encoder, kind, source, len(rows), done, total, on_read)
                encoded_rows.append(
                    _mapped(
                        rows, encode, encoded_folder / f"{number}.arrow", LINES if source.reader == "text" else BATCH
                    )
                )
                done += len(rows)
            about = write_tokens(
                folder, encoded_rows, end_id=encoder.end_id, pad_id=encoder.pad_id, mask_id=encoder.mask_id
            )
        if not about.tokens:
            raise WorkloadError(f"the data in {', '.join(plan.paths)} has no token: its texts are empty")
        for read_once in (folder / "raw", encoded_folder):
            shutil.rmtree(read_once, ignore_errors=True)
        if _stamps(sources) != stamps:
            raise WorkloadError(f"the data in {', '.join(plan.paths)} changed while it was read; start again")
        return about

    return made_once(cache, wanted, make)


def _stamps(sources: list[Source]) -> list[Any]:
    """Returns the paths, sizes and times of sources, which change if the data does; JSON-ready."""
    return [[source.reader, *map(list, source.stamps())] for source in sources]


def _check_kinds(plan: DataPlan, kinds: set[RowKind], vocab_size: int) -> None:
    if len(kinds) > 1:
        raise WorkloadError(
            f"the data in {', '.join(plan.paths)} mixes {' and '.join(sorted(kinds))} rows; give data of one kind"
        )
    by_bytes = plan.tokenizer in (None, BYTES)
    if by_bytes and kinds == {"text"} and vocab_size < encoder_of(None).size:
        raise WorkloadError(
            f"{plan.paths[0]}: text by bytes needs a vocabulary of at least {encoder_of(None).size} tokens, but the model "
            f"has {vocab_size}; give a tokenizer"
        )


def _encoded(
    encoder: Encoder, kind: RowKind, source: Source, count: int, done: int, total: int, on_read: OnRead,
    rows: Any, numbers: list[int],
) -> dict[str, list[Any]]:  # fmt: skip
    """Encodes a batch of rows with these numbers, and reports the progress."""
    if source.reader == "text":
        lines = "".join(rows["text"])
        rows = {"text": [lines], "first": [numbers[0] == 0], "last": [numbers[-1] == count - 1]}
    try:
        encoded = encoder.texts(rows) if kind == "text" else encoded_tokens(rows)
    except WorkloadError as error:
        raise WorkloadError(f"{source.path}, rows {numbers[0]} to {numbers[-1]}: {error}") from None
    on_read((done + numbers[-1] + 1) / total)
    return encoded


def _mapped(rows: "datasets.Dataset", encode: Callable[..., Any], path: Path, batch_size: int) -> "datasets.Dataset":
    from datasets import Features, List, Value

    features = Features({"tokens": List(Value("uint32")), "trained": List(Value("uint8")), "last": Value("bool")})
    return rows.map(
        encode, batched=True, with_indices=True, batch_size=batch_size, remove_columns=rows.column_names, features=features,
        cache_file_name=str(path),
        # Otherwise the function is pickled for its hash, with the listener that it reports to.
        new_fingerprint=path.stem,
    )  # fmt: skip


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            enable_progress_bars()
