"""Tokens on disk (one file, written once under a lock and mapped into memory), and samples of them by
position, which are cut in a row, or a document each.

The position is in an endless sequence, whose order depends only on the seed.

n     number of samples
L     tokens of a sample
row   number of the window of L tokens, or of the document, that a sample is cut from
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...base.writing import cannot_write, make_folder
from ...models.data import Task, inputs_and_labels
from ...training.training_data import IGNORED
from .order import DataPlan, HashedDraw, Packing, Split, shuffled

if TYPE_CHECKING:
    import datasets
    import torch


ABOUT, BOUNDARIES, TOKENS, TRAINED = "about.json", "boundaries.npy", "tokens", "trained"
"""Files of a folder: its description, the first token of each document, all tokens as uint32, and 1 as uint8 for each that is
trained on.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """Description of a store."""

    tokens: int
    documents: int
    largest: int
    """The largest token."""
    digest: str
    """SHA-256 of tokens, boundaries and the training mask, hex."""
    masked: bool
    """True if some tokens are not trained on."""
    end_id: int | None
    """Token that ends a text."""
    pad_id: int | None
    """Padding token of the tokenizer."""
    mask_id: int | None
    """Mask token of the tokenizer."""


def made_once(cache: Path, wanted: Mapping[str, Any], make: Callable[[Path], StoreInfo]) -> Path:
    """Returns the folder of `wanted`: an existing one, or one that is made while other processes wait.

    It is made under another name and renamed when it is whole, so that a killed process leaves nothing that counts.

    Args:
        cache: parent folder.
        wanted: everything that the contents depend on, JSON-ready.
        make: fills an empty folder, and returns its description.

    Raises:
        StudyError: the cache cannot be written.
    """
    from filelock import FileLock

    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder, unfinished = cache / key, cache / f".{key}"
    if (folder / ABOUT).is_file():
        return folder
    make_folder(cache)
    try:
        with FileLock(cache / f".{key}.lock"):
            if not (folder / ABOUT).is_file():
                shutil.rmtree(folder, ignore_errors=True)  # a part of it was removed
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    (unfinished / ABOUT).write_text(json.dumps(asdict(make(unfinished)), indent=1), encoding="utf-8")
                    os.rename(unfinished, folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise cannot_write(cache, error) from error
    return folder


def write_tokens(
    folder: Path, parts: "Iterable[datasets.Dataset]", *, end_id: int | None, pad_id: int | None,
    mask_id: int | None,
) -> StoreInfo:  # fmt: skip
    """Writes the tokens of rows, one after the other, and returns their description.

    Args:
        parts: rows with the columns of `Encoder`, in order.
    """
    hashes = [hashlib.sha256(), hashlib.sha256()]
    boundaries = [np.zeros(1, dtype=np.int64)]
    count = largest = 0
    masked = False
    with (folder / TOKENS).open("wb") as tokens_file, (folder / TRAINED).open("wb") as trained_file:
        for batch in (batch for rows in parts for batch in rows.data.table.to_batches()):
            tokens, trained = (batch.column(name).flatten().to_numpy() for name in ("tokens", "trained"))
            for values, file, digest in zip((tokens, trained), (tokens_file, trained_file), hashes):
                file.write(values.data)
                digest.update(values.data)
            ends = count + np.cumsum(np.diff(batch.column("tokens").offsets.to_numpy()), dtype=np.int64)
            boundaries.append(ends[batch.column("last").to_numpy(zero_copy_only=False).astype(bool)])
            count += len(tokens)
            largest = max(largest, int(tokens.max(initial=0)))
            masked = masked or not trained.all()
    starts = np.concatenate(boundaries)
    np.save(folder / BOUNDARIES, starts)
    tokens_digest, trained_digest = (digest.hexdigest() for digest in hashes)
    together = f"{tokens_digest}{hashlib.sha256(starts.tobytes()).hexdigest()}{trained_digest}"
    return StoreInfo(
        tokens=count, documents=len(starts) - 1, largest=largest, masked=masked,
        digest=hashlib.sha256(together.encode()).hexdigest(), end_id=end_id, pad_id=pad_id, mask_id=mask_id,
    )  # fmt: skip


class TokenStore:
    """Tokens of a folder that `made_once` has made, mapped into memory; it pickles as its folder.

    Args:
        folder: filled by `write_tokens`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = StoreInfo(**json.loads((folder / ABOUT).read_bytes()))
        self.boundaries: np.ndarray = np.load(folder / BOUNDARIES, mmap_mode="r")
        """Index of the first token of each document, and the end of the last, int64, shape [documents + 1]."""
        self.tokens: np.ndarray = np.memmap(folder / TOKENS, dtype=np.uint32, mode="r")
        self.trained: np.ndarray = np.memmap(folder / TRAINED, dtype=np.uint8, mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)


# 32 MiB of int64: enough to make the cost of a call negligible, little enough for any host.
_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Samples cut from the tokens."""

    tokens: np.ndarray
    """int64, shape [n, L]."""
    trained: np.ndarray | None
    """Mask of predicted tokens, bool, shape [n, L]; None for all."""
    real: np.ndarray | None
    """Mask of tokens that are not padding, bool, shape [n, L]; None for all."""


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Source of the samples, and how they are cut."""

    store: TokenStore
    packing: Packing
    length: int
    """Tokens of a sample, L."""
    pad_id: int

    @property
    def num_rows(self) -> int:
        """Number of rows, including those without tokens to train on."""
        if self.packing == "padded":
            return len(self.store.boundaries) - 1
        return self.store.about.tokens // self.length

    @property
    def shortened(self) -> int:
        """Number of documents that are longer than a sample, whose ends are cut off."""
        return int((np.diff(self.store.boundaries) > self.length).sum()) if self.packing == "padded" else 0

    def cut(self, rows: np.ndarray) -> Cut:
        store, offsets, real = self.store, np.arange(self.length, dtype=np.int64), None
        if self.packing == "packed":
            places = rows[:, None] * self.length + offsets
        else:
            starts = store.boundaries[rows]
            real = offsets < (store.boundaries[rows + 1] - starts)[:, None]
            places = np.where(real, starts[:, None] + offsets, 0)
        tokens = store.tokens[places].astype(np.int64)
        trained = store.trained[places].astype(bool) if store.about.masked else None
        if real is not None:
            tokens[~real] = self.pad_id
            trained = real if trained is None else trained & real
        return Cut(tokens=tokens, trained=trained, real=real)


def usable_rows(layout: SampleLayout, task: Task) -> np.ndarray | None:
    """Rows with tokens to train on, int64; None for all. A row without any would have no mean loss."""
    least = 2 if task == "causal" else 1
    if layout.store.about.masked:
        step = max(1, _TOKENS_AT_ONCE // layout.length)
        good = np.zeros(layout.num_rows, dtype=bool)
        for begin in range(0, layout.num_rows, step):
            trained = layout.cut(np.arange(begin, min(begin + step, layout.num_rows), dtype=np.int64)).trained
            assert trained is not None
            # The first token of a causal sample is not predicted.
            good[begin : begin + step] = trained[:, least - 1 :].any(axis=1)
    elif layout.packing == "padded":
        good = np.diff(layout.store.boundaries) >= least
    else:
        return None
    return None if good.all() else np.flatnonzero(good)


_TRAINING, _EVALUATION = 1, 2
"""Random streams of the masks of masked language models."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of tokens: `samples(start, count)` is the batch at positions `start` to `start + count - 1`.

    A batch has `input_ids` and `labels`, int64, shape [count, seq_len], like `models.data.TokenBatches`, and if needed
    `attention_mask` (padding, for models that attend in both directions).
    Epochs follow each other, each in its own order. A batch depends only on seed and positions: it is the same however
    positions are grouped into calls, on any rank, in any process, after any restart. Made by `prepare`; safe to use
    from several threads.
    """

    plan: DataPlan
    """The request."""
    task: Task
    """`causal`, `masked` or `seq2seq`."""
    vocab_size: int
    """All ids are smaller."""
    pad_id: int | None
    """An id that does not replace a masked token."""
    layout: SampleLayout
    """Cuts samples from tokens."""
    usable: np.ndarray | None
    """Rows that samples are cut from, int64; None for all."""
    split: Split
    """Samples that are held out."""

    in_main_thread: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.num_training

    @property
    def num_training(self) -> int:
        return self.split.training

    @property
    def num_evaluation(self) -> int:
        return self.split.evaluation

    @property
    def even(self) -> bool:
        return self.layout.packing == "packed" and not self.layout.store.about.masked

    def ids(self, start: int, count: int) -> np.ndarray:
        """Numbers in the data of the samples at these positions, int64, shape [count]."""
        positions = _range(start, count)
        if self.plan.shuffle:
            return self.split.training_ids(shuffled(positions, len(self), self.plan.seed))
        return self.split.training_ids(positions % len(self))

    def __call__(self, start: int, count: int) -> "dict[str, torch.Tensor]":
        draw = HashedDraw(self.plan.seed, _TRAINING, _range(start, count))
        return self._batch(self.ids(start, count), draw)

    def evaluation(self, start: int, count: int) -> "dict[str, torch.Tensor]":
        """Held-out samples by number, independent of the seed.

        Raises:
            IndexError: there are fewer samples.
        """
        numbers = _range(start, count)
        if start + count > self.num_evaluation:
            raise IndexError(
                f"samples {start} to {start + count - 1} were requested, but {self.num_evaluation} are held out"
            )
        return self._batch(self.split.evaluation_ids(numbers), HashedDraw(0, _EVALUATION, numbers))

    def describe(self) -> dict[str, Any]:
        about = self.layout.store.about
        follows: Mapping[str, Any] = {
            "tokens_digest": about.digest,
            "task": self.task,
            "sample_tokens": self.layout.length,
            "packing": self.plan.packing,
            "held_out": self.plan.held_out,
            "shuffle": self.plan.shuffle,
            "seed": self.plan.seed,
        }
        return {
            "paths": list(self.plan.paths),
            "tokenizer": self.plan.tokenizer or "bytes",
            "documents": about.documents,
            "tokens": about.tokens,
            "samples": self.num_training,
            "evaluation_samples": self.num_evaluation,
            "unused_samples": self.layout.num_rows - self.split.samples,
            "shortened_documents": self.layout.shortened,
            **follows,
            "digest": hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest(),
        }

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.usable is None else self.usable[ids]

    def _batch(self, ids: np.ndarray, draw: HashedDraw) -> "dict[str, torch.Tensor]":
        import torch

        cut = self.layout.cut(self._rows(ids))
        real = None if cut.real is None else torch.from_numpy(cut.real)
        batch = inputs_and_labels(
            self.task, torch.from_numpy(cut.tokens), vocab_size=self.vocab_size, pad_id=self.pad_id,
            mask_id=self.layout.store.about.mask_id, draw=draw, real=real,
        )  # fmt: skip
        if self.task == "causal" and cut.trained is not None:
            batch["labels"] = torch.from_numpy(np.where(cut.trained, cut.tokens, IGNORED))
        if real is not None and self.task != "causal":  # a causal model's tokens do not see the padding after them
            batch["attention_mask"] = real.long()
        return batch


def _range(start: int, count: int) -> np.ndarray:
    if start < 0 or count < 1:
        raise IndexError(f"positions must be from 0 on and at least one, but are {count} from {start}")
    return np.arange(start, start + count, dtype=np.int64)
