"""Tokens on disk: Arrow files that `datasets` writes, made once under a lock and mapped into memory."""

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.writing import cannot_write, make_folder

if TYPE_CHECKING:
    import datasets

ABOUT, BOUNDARIES, ROWS = "about.json", "boundaries.npy", "rows"
"""Files of a folder: its description, the first token of each document, and a folder of Arrow files."""


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
    conversations: bool
    """True if the documents are conversations."""
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
    folder: Path, parts: "Iterable[datasets.Dataset]", *, conversations: bool, end_id: int | None, pad_id: int | None,
    mask_id: int | None,
) -> StoreInfo:  # fmt: skip
    """Writes what a store has beside its rows, which are in `folder / ROWS`, and returns its description.

    Args:
        parts: the rows, with the columns of `Encoder`, in order.
    """
    tokens_hash, trained_hash = hashlib.sha256(), hashlib.sha256()
    boundaries = [np.zeros(1, dtype=np.int64)]
    count = largest = 0
    masked = False
    for rows in parts:
        ends_document = rows.with_format("numpy", columns=["last"])[:]["last"] if len(rows) else np.zeros(0, dtype=bool)
        lengths = []
        for tokens, trained, sizes in _chunks(rows.data.table):
            largest = max(largest, int(tokens.max(initial=0)))
            masked = masked or not trained.all()
            tokens_hash.update(np.ascontiguousarray(tokens).data)
            trained_hash.update(np.ascontiguousarray(trained).data)
            lengths.append(sizes)
        ends = count + np.cumsum(np.concatenate([np.zeros(0, dtype=np.int64), *lengths]))
        boundaries.append(ends[np.asarray(ends_document, dtype=bool)])
        count = int(ends[-1]) if len(ends) else count
    starts = np.concatenate(boundaries)
    np.save(folder / BOUNDARIES, starts)
    hashes = [tokens_hash.hexdigest(), hashlib.sha256(starts.tobytes()).hexdigest(), trained_hash.hexdigest()]
    return StoreInfo(
        tokens=count, documents=len(starts) - 1, largest=largest, masked=masked, conversations=conversations,
        digest=hashlib.sha256("".join(hashes).encode()).hexdigest(), end_id=end_id, pad_id=pad_id, mask_id=mask_id,
    )  # fmt: skip


def _chunks(table: Any) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields tokens, training mask and lengths of the rows of each chunk of an Arrow table; views of its memory."""
    for tokens, trained in zip(table.column("tokens").chunks, table.column("trained").chunks, strict=True):
        lengths = np.diff(tokens.offsets.to_numpy())
        yield tokens.flatten().to_numpy(), trained.flatten().to_numpy(), lengths.astype(np.int64)


class TokenStore:
    """Tokens of a folder that `made_once` has made, mapped into memory; it pickles as its folder.

    Args:
        folder: filled by `write_tokens`.
    """

    about: StoreInfo
    boundaries: np.ndarray
    """Index of the first token of each document, and the end of the last, int64, shape [documents + 1]."""

    def __init__(self, folder: Path) -> None:
        import pyarrow

        self.folder = folder
        self.about = StoreInfo(**json.loads((folder / ABOUT).read_bytes()))
        self.boundaries = np.load(folder / BOUNDARIES, mmap_mode="r")
        self._tokens: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        for path in sorted((folder / ROWS).glob("*.arrow")):
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
            for tokens, trained, _ in _chunks(table):
                self._tokens.append(tokens)
                self._trained.append(trained)
        self._ends = np.cumsum([len(tokens) for tokens in self._tokens]).tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    def put(self, target: np.ndarray, start: int) -> None:
        """Fills `target` with the tokens from `start` on."""
        self._put(target, start, self._tokens)

    def put_trained(self, target: np.ndarray, start: int) -> None:
        """Fills `target`, bool, with the training mask of the tokens from `start` on."""
        self._put(target, start, self._trained)

    def _put(self, target: np.ndarray, start: int, chunks: list[np.ndarray]) -> None:
        done = 0
        for number in range(bisect_right(self._ends, start), len(chunks)):
            chunk = chunks[number]
            begin = start + done - (self._ends[number] - len(chunk))
            taken = chunk[begin : begin + len(target) - done]
            target[done : done + len(taken)] = taken
            done += len(taken)
            if done == len(target):
                return
