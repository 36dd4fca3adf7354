"""Prepares samples from a request: reads, tokenises and checks the data once, then maps it into memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import WorkloadError
from ...models.data import Task, window
from .documents import OF_TOKENS, BadRows, DataFile, Piece, find_sources, pieces_of
from .encoder import encoded, encoder_of, tokenizer_digest
from .order import BYTES, DataPlan, Split
from .packing import SampleLayout, UsableRows, usable_rows
from .samples import Samples
from .store import TokenFile, TokenStore, indexed_tokens, made_once, plain_tokens, write_about_tokens, write_texts

FORMAT = 1
"""Version of the cache, which changes if the same files give other tokens."""
REPORT_S = 0.5
"""Interval between progress reports, s."""
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

    Texts are tokenised a few MiB at a time into a folder of the cache, once: other processes with the same request
    wait for the first, and later ones find the result. Files of tokens stay in place and are checked once.

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
    if task != "causal":
        plan = replace(plan, train_on="all")
    sources = find_sources(plan.paths)
    if plan.tokenizer in (None, BYTES) and vocab_size < encoder_of(None).size and sources[0].kind not in OF_TOKENS:
        raise WorkloadError(
            f"{sources[0].path}: text by bytes needs a vocabulary of at least {encoder_of(None).size} tokens, but the model "
            f"has {vocab_size}; give a tokenizer"
        )
    store = TokenStore(_tokens(plan, sources, vocab_size, cache, _rate_limited(on_read)))
    about = store.about
    if about.largest >= vocab_size:
        source = (
            f"the tokenizer {plan.tokenizer or BYTES} yields" if sources[0].kind not in OF_TOKENS else "the data has"
        )
        raise WorkloadError(
            f"{plan.paths[0]}: {source} token {about.largest}, but the model's vocabulary has {vocab_size}; they do not "
            "fit together"
        )
    plan = _resolved(plan, store, task)
    fills = [each for each in (pad_id, about.pad_id, about.end_id, 0) if each is not None and 0 <= each < vocab_size]
    assert plan.packing is not None
    layout = SampleLayout(store=store, packing=plan.packing, length=window(task, seq_len), pad_id=fills[0])
    usable = usable_rows(layout, task, cache)
    _check_size(plan, layout, usable)
    split = Split.of(usable.samples, plan.held_out)
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
    if task != "causal" and plan.train_on == "assistant":
        raise WorkloadError(f"train_on=assistant is for causal language models, and this one's task is {task}")
    if task != "causal" and plan.packing == "documents":
        raise WorkloadError(
            f"packing=documents is for causal language models, and this one's task is {task}; give packing=packed"
        )
    if task == "seq2seq" and plan.packing == "padded":
        raise WorkloadError(
            "packing=padded makes a sample of a document, but sequence to sequence predicts what follows a text from it; "
            "give packing=packed"
        )


def _resolved(plan: DataPlan, store: TokenStore, task: Task) -> DataPlan:
    conversations = store.about.conversations
    if conversations and task == "seq2seq":
        raise WorkloadError(
            f"{plan.paths[0]} contains conversations, which only causal language models can be trained on"
        )
    packing = plan.packing or ("padded" if conversations else "packed")
    if packing != "packed" and store.boundaries is None:
        raise WorkloadError(
            f"{plan.paths[0]} contains tokens without the starts of documents, which packing={packing} needs; give the "
            "tokenizer, whose end-of-text token marks them, or packing=packed"
        )
    return replace(plan, packing=packing, train_on="assistant" if store.about.masked else "all")


def _check_size(plan: DataPlan, layout: SampleLayout, usable: UsableRows) -> None:
    tokens, length = layout.store.about.tokens, layout.length
    where = plan.paths[0] if len(plan.paths) == 1 else f"the data in {', '.join(plan.paths)}"
    if layout.packing != "padded" and tokens < length:
        raise WorkloadError(
            f"{where} is too short: a sample has {length} tokens, but the data has {tokens}; give more data or a smaller "
            "sequence length"
        )
    if not usable.samples:
        raise WorkloadError(
            f"{where} has nothing to train on: in none of {layout.num_rows} samples of {length} tokens is there a token to "
            "predict; give a larger sequence length or train_on=all"
        )


def _tokens(plan: DataPlan, sources: list[DataFile], vocab_size: int, cache: Path, on_read: OnRead) -> Path:
    """Returns the folder of the tokens, and creates it if necessary."""
    stamps = [each.stamps() for each in sources]
    wanted = {
        "format": FORMAT,
        "sources": [[each.kind, *map(list, stamp)] for each, stamp in zip(sources, stamps)],
        "tokenizer": tokenizer_digest(plan.tokenizer),
    }
    if sources[0].kind in OF_TOKENS:
        if plan.train_on == "assistant":
            raise WorkloadError(f"{plan.paths[0]} contains tokens; train_on=assistant needs conversations")
        wanted["wide"] = vocab_size > 1 << 16
    else:
        wanted |= {"field": plan.field, "train_on": plan.train_on}
        wanted |= {"skip_bad_rows": True} if plan.skip_bad_rows else {}

    def make(folder: Path) -> dict[str, Any]:
        filled = _of_files if sources[0].kind in OF_TOKENS else _of_texts
        made = filled(folder, plan, sources, vocab_size, on_read)
        if [each.stamps() for each in sources] != stamps:
            raise WorkloadError(f"the data in {', '.join(plan.paths)} changed while it was read; start again")
        return made

    return made_once(cache, wanted, make)


def _rate_limited(on_read: OnRead) -> OnRead:
    """Limits calls of `on_read` to one per `REPORT_S`."""
    last = time.monotonic()

    def limited(share: float) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_S:
            on_read(share)
            last = time.monotonic()

    return limited


def _pieces(sources: list[DataFile], field: str, bad: BadRows, on_read: OnRead) -> Iterator[Piece]:
    """Yields the documents of all sources, and reports the progress."""
    sizes = [sum(size for _, size, _ in each.stamps()) for each in sources]
    total = max(1, sum(sizes))
    for number, source in enumerate(sources):
        for piece in pieces_of(source, field, bad):
            on_read((sum(sizes[:number]) + piece.read * sizes[number]) / total)
            yield piece


def _of_texts(
    folder: Path, plan: DataPlan, sources: list[DataFile], vocab_size: int, on_read: OnRead
) -> dict[str, Any]:
    bad = BadRows(plan.skip_bad_rows)
    pieces = _pieces(sources, plan.field, bad, on_read)
    first = next(pieces, None)
    if first is None:
        if bad.count:
            raise _no_good_row(bad)
        raise WorkloadError(f"the data in {', '.join(plan.paths)} is empty: give files with data to train on")
    conversations = isinstance(first.content, list)
    if plan.train_on == "assistant" and not conversations:
        raise WorkloadError(f"{first.where} contains text; train_on=assistant needs conversations")
    encoder = encoder_of(plan.tokenizer)
    train_on = plan.train_on or ("assistant" if conversations else "all")
    written = write_texts(
        folder, encoded(chain([first], pieces), encoder, train_on, bad), encoder, vocab_size=vocab_size,
        conversations=conversations, masked=train_on == "assistant",
    )  # fmt: skip
    if bad.count and not written["documents"]:
        raise _no_good_row(bad)
    return {**written, "skipped": bad.count, "first_skipped": bad.first}


def _no_good_row(bad: BadRows) -> WorkloadError:
    return WorkloadError(f"all {bad.count} rows are bad, so nothing is left to train on; the first: {bad.first}")


def _of_files(
    folder: Path, plan: DataPlan, sources: list[DataFile], vocab_size: int, on_read: OnRead
) -> dict[str, Any]:
    encoder = encoder_of(plan.tokenizer) if plan.tokenizer not in (None, BYTES) else None
    files: list[tuple[TokenFile, np.ndarray | None]] = [
        indexed_tokens(each) if each.kind == "indexed" else (plain_tokens(each, vocab_size), None) for each in sources
    ]
    return write_about_tokens(
        folder, files, vocab_size=vocab_size, end_id=encoder.end_id if encoder else None,
        pad_id=encoder.pad_id if encoder else None, mask_id=encoder.mask_id if encoder else None, on_read=on_read,
    )  # fmt: skip
