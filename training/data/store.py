"""Token files on disk: made once under a lock, written in shards, read by memory map.

Existing token files are nanoGPT's `.bin`, and Megatron's `.bin` with its `.idx`. nanoGPT's contains only tokens:
uint16, or uint32 if the vocabulary needs it. Megatron's index (megatron.core.datasets.indexed_dataset) begins with
`MMIDIDX`, its version (uint64), a code for the type of tokens (uint8) and two counts (uint64). Then follow the lengths
of all sequences (int32), the offset of each in the `.bin` (bytes, int64), and the number of the sequence that each
document begins with (int64), with the count of sequences at the end.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import WorkloadError
from ...base.writing import cannot_write, make_folder
from .documents import DataFile
from .encoder import Encoded, Encoder

ABOUT = "about.json"
"""File in each folder with its origin and contents, written last."""
ABANDONED_S = 3600.0
"""Time without a change after which the unfinished folder of another host counts as left behind, s."""


def made_once(cache: Path, wanted: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Returns the folder of `wanted`: an existing one, or one that is made while other processes wait.

    It is made under another name and then renamed, so that a killed process leaves nothing that counts. Other
    processes wait by flock(2), which a dead process does not hold. If a file system has no locks, several processes
    make it, and the first one to finish wins.

    Args:
        cache: parent folder.
        wanted: everything that the contents depend on, JSON-ready.
        make: fills an empty folder, and returns a JSON-ready description; its `files` are the files' sizes in bytes.

    Raises:
        StudyError: the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache / key
    if _is_complete(folder):
        return folder
    make_folder(cache)
    try:
        with _lock(cache / f".{key}.lock"):
            if not _is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)  # it was altered
                _sweep(cache, key)
                _make(folder, wanted, make)
    except OSError as error:
        raise cannot_write(cache, error) from error
    return folder


def read_about(folder: Path) -> dict[str, Any]:
    """Description of a folder's contents."""
    return dict(json.loads((folder / ABOUT).read_bytes()))


def _is_complete(folder: Path) -> bool:
    """True if the folder exists, with all files of the right size."""
    try:
        sizes = read_about(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(folder: Path, wanted: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]) -> None:
    unfinished = folder.with_name(f".{folder.name}.{_host()}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        holds = make(unfinished)
        files = {}
        for each in sorted(unfinished.iterdir()):
            files[each.name] = each.stat().st_size
            _sync(each)
        about = {**holds, "wanted": wanted, "files": files}
        (unfinished / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        _sync(unfinished / ABOUT)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not _is_complete(folder):  # without locks another process may have been faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep(cache: Path, key: str) -> None:
    """Removes leftovers of killed processes: those of this host at once, since they do not hold the lock, others by age."""
    for each in cache.glob(f".{key}.*.*"):
        own_temporary = each.name.rpartition(".")[0] == f".{key}.{_host()}"
        with suppress(OSError):
            newest = max((part.stat().st_mtime for part in (each, *each.iterdir())), default=0.0)
            if (own_temporary and not _running(each.name)) or time.time() - newest > ABANDONED_S:
                shutil.rmtree(each, ignore_errors=True)


def _running(name: str) -> bool:
    """True if the process of this host whose id ends the name is running."""
    number = name.rpartition(".")[2]
    return number.isdigit() and Path(f"/proc/{number}").exists() and int(number) != os.getpid()


def _host() -> str:
    return re.sub(r"[^\w-]", "_", socket.gethostname())


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CHUNK = 1 << 22
"""Number of tokens that are processed at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """Tokens in a file."""

    path: str
    dtype: str
    """NumPy's name of their type."""
    count: int

    def open(self) -> np.ndarray:
        """The tokens, mapped into memory."""
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,)))


def plain_tokens(source: DataFile, vocab_size: int) -> TokenFile:
    """The tokens of a nanoGPT file.

    Raises:
        WorkloadError: it is empty, has a fraction of a token, or its tokens are wider than the vocabulary needs.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    size = source.path.stat().st_size
    if not size:
        raise WorkloadError(f"the data file {source.path} is empty: give one with tokens")
    if size % dtype.itemsize:
        raise WorkloadError(
            f"{source.path} has {size} bytes, and tokens of a vocabulary of {vocab_size} have {dtype.itemsize} each"
        )
    found = TokenFile(path=str(source.path.absolute()), dtype=dtype.name, count=size // dtype.itemsize)
    begin = found.open()[:CHUNK]
    if dtype == np.uint16 and len(begin) >= 4 and not begin[1::2].any() and begin.any():
        raise WorkloadError(
            f"{source.path}: every other token is 0, as if tokens had 4 bytes, but those of a vocabulary of {vocab_size} "
            "have 2; write them as uint16"
        )
    return found


def indexed_tokens(source: DataFile) -> tuple[TokenFile, np.ndarray]:
    """The tokens of Megatron's files, and the index of the first token of each document, with the end of the last,
    int64.

    Raises:
        WorkloadError: the index is damaged, belongs to other tokens, or does not list them in a row.
    """
    index = source.path.with_suffix(".idx")
    data = np.memmap(index, dtype=np.uint8, mode="r") if index.stat().st_size >= _HEADER.size else np.zeros(0, np.uint8)
    magic, version, code, sequences, marks = (
        _HEADER.unpack(data[: _HEADER.size].tobytes()) if len(data) else (b"", 0, 0, 0, 0)
    )
    if magic != _MAGIC:
        raise WorkloadError(f"{index} is not an index of Megatron: it does not begin with MMIDIDX")
    if version != 1 or code not in _TYPES:
        raise WorkloadError(
            f"{index} has version {version} and type {code}; known are version 1 and types {list(_TYPES)}"
        )
    if len(data) < _HEADER.size + 12 * sequences + 8 * marks:
        raise WorkloadError(f"{index} is cut short: it has {len(data)} bytes for {sequences} sequences; copy it again")
    lengths, pointers, documents = _parts(data, sequences, marks)
    dtype = np.dtype(_TYPES[code])
    count = _in_a_row(index, lengths, pointers, dtype.itemsize)
    size = source.path.stat().st_size
    if size != count * dtype.itemsize:
        raise WorkloadError(
            f"{source.path} has {size} bytes, but its index names {count} tokens of {dtype.itemsize} bytes; they do not "
            "fit together"
        )
    if not count:
        raise WorkloadError(f"the data file {source.path} is empty: give one with tokens")
    ordered = not (np.diff(documents) < 0).any()
    if not marks or documents[0] or not ordered or documents[-1] != sequences:
        raise WorkloadError(f"{index} is damaged: its documents are not those of its {sequences} sequences")
    begins = np.append(np.asarray(pointers) // dtype.itemsize, count)[np.asarray(documents)]
    return TokenFile(path=str(source.path.absolute()), dtype=dtype.name, count=count), np.unique(begins)


def _parts(data: np.ndarray, sequences: int, marks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = _HEADER.size
    parts = []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", marks)):
        size = np.dtype(dtype).itemsize * count
        parts.append(data[at : at + size].view(dtype))
        at += size
    return parts[0], parts[1], parts[2]


def _in_a_row(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Number of tokens of the sequences, each of which must begin at the end of the one before."""
    count = 0
    for at in range(0, len(lengths), CHUNK):
        some = np.asarray(lengths[at : at + CHUNK], dtype=np.int64)
        ends = count + np.cumsum(some)
        if (some < 0).any() or not np.array_equal(pointers[at : at + CHUNK], (ends - some) * itemsize):
            raise WorkloadError(f"{index}: its sequences do not follow each other in the .bin; build the files again")
        count = int(ends[-1])
    return count


def chunks(file: TokenFile, vocab_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the tokens of a file in chunks, with the index of each chunk's first token.

    Raises:
        WorkloadError: a token is not in the vocabulary.
    """
    tokens: Any = file.open()
    for at in range(0, file.count, CHUNK):
        some = tokens[at : at + CHUNK]
        for wrong in (int(some.max()), int(some.min())):
            if not 0 <= wrong < vocab_size:
                raise WorkloadError(
                    f"{file.path} contains token {wrong}, but the model's vocabulary has {vocab_size}; they do not fit "
                    "together"
                )
        yield at, some


TOKENS, BOUNDARIES, TRAINED = "tokens.bin", "boundaries.bin", "trained.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """Description of a store."""

    parts: list[dict[str, Any]]
    """Files of the tokens in order, as `TokenFile`; a path without a folder is in the store's own folder."""
    tokens: int
    documents: int | None
    """Number of documents; None if their starts are unknown."""
    largest: int
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
    skipped: int = 0
    """Number of rows that could not be read and were skipped."""
    first_skipped: str = ""
    """Error of the first skipped row."""


def write_texts(
    folder: Path, pieces: Iterable[Encoded], encoder: Encoder, *, vocab_size: int, conversations: bool, masked: bool
) -> dict[str, Any]:
    """Writes the tokens of texts as they arrive, and returns the description of the store.

    Raises:
        WorkloadError: there is no token, or one that is not in the vocabulary.
        OSError: the files cannot be written.
    """
    hashes = [hashlib.sha256() for _ in range(3)]
    tokens = documents = 0
    largest = -1
    with (
        (folder / TOKENS).open("wb") as token_file,
        (folder / BOUNDARIES).open("wb") as boundary_file,
        (folder / TRAINED).open("wb") as trained_file,
    ):

        def put(number: int, file: Any, values: np.ndarray) -> None:
            data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
            file.write(data)
            hashes[number].update(data)

        put(1, boundary_file, np.zeros(1, dtype=np.int64))
        for piece in pieces:
            if len(piece.tokens):
                largest = max(largest, int(piece.tokens.max()))
            if largest >= vocab_size:
                raise WorkloadError(
                    f"{piece.where}: the tokenizer in {encoder.name} yields token {largest}, but the model's vocabulary "
                    f"has {vocab_size}; they do not match"
                )
            put(0, token_file, piece.tokens.astype(encoder.dtype))
            tokens += len(piece.tokens)
            if masked:
                put(2, trained_file, np.ones(len(piece.tokens), bool) if piece.trained is None else piece.trained)
            if piece.last:
                documents += 1
                put(1, boundary_file, np.array([tokens], dtype=np.int64))
    if not tokens:
        raise WorkloadError(f"the data has no token by the tokenizer in {encoder.name}: its texts are empty")
    if not masked:
        (folder / TRAINED).unlink()
    about = StoreInfo(
        parts=[asdict(TokenFile(path=TOKENS, dtype=encoder.dtype.name, count=tokens))], tokens=tokens,
        documents=documents, largest=largest, digest=_together(hashes), masked=masked, conversations=conversations,
        end_id=encoder.end_id, pad_id=encoder.pad_id, mask_id=encoder.mask_id,
    )  # fmt: skip
    return asdict(about)


def write_about_tokens(
    folder: Path,
    files: Sequence[tuple[TokenFile, np.ndarray | None]],
    *,
    vocab_size: int,
    end_id: int | None,
    pad_id: int | None,
    mask_id: int | None,
    on_read: Callable[[float], None],
) -> dict[str, Any]:
    """Checks files of tokens, which stay in place, and returns the description of the store.

    Args:
        files: files with the index of the first token of each document and the end of the last, if known.
        vocab_size: all ids must be smaller.
        end_id: token that ends a document, for files without an index.
        on_read: receives the share of the tokens that is checked, from 0 to 1.

    Raises:
        WorkloadError: a token is not in the vocabulary.
        OSError: the files cannot be written.
    """
    hashes = [hashlib.sha256() for _ in range(2)]
    known = end_id is not None or all(begins is not None for _, begins in files)
    everything = max(1, sum(file.count for file, _ in files))
    total = documents = 0
    largest = -1
    with (folder / BOUNDARIES).open("wb") as boundary_file:

        def put(ends: np.ndarray) -> int:
            data = np.ascontiguousarray(ends, dtype=np.int64).tobytes()
            boundary_file.write(data)
            hashes[1].update(data)
            return len(ends)

        put(np.zeros(1, dtype=np.int64))
        for file, begins in files:
            last = 0
            for at, some in chunks(file, vocab_size):
                on_read((total + at) / everything)
                hashes[0].update(np.ascontiguousarray(some).data.cast("B"))
                largest = max(largest, int(some.max()))
                if begins is None and known:
                    ends = at + 1 + np.flatnonzero(some == end_id)
                    documents += put(total + ends)
                    last = int(ends[-1]) if len(ends) else last
            if begins is not None:
                documents += put(total + begins[1:])
            elif known and last < file.count:  # the last document has no end
                documents += put(np.array([total + file.count]))
            total += file.count
    if not known:
        (folder / BOUNDARIES).unlink()
    about = StoreInfo(
        parts=[asdict(file) for file, _ in files], tokens=total, documents=documents if known else None,
        largest=largest, digest=_together(hashes), masked=False, conversations=False, end_id=end_id, pad_id=pad_id,
        mask_id=mask_id,
    )  # fmt: skip
    return asdict(about)


def _together(hashes: Sequence[Any]) -> str:
    return hashlib.sha256("".join(each.hexdigest() for each in hashes).encode()).hexdigest()


class TokenStore:
    """Tokens in one or several files, mapped into memory; it pickles as its folder.

    Args:
        folder: folder filled by `write_texts` or `write_about_tokens`.
    """

    about: StoreInfo
    boundaries: np.ndarray | None
    """Index of the first token of each document, and the end of the last, int64, shape [documents + 1]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        known = read_about(folder)
        self.about = StoreInfo(**{name: known[name] for name in StoreInfo.__dataclass_fields__ if name in known})
        files = [TokenFile(**part) for part in self.about.parts]
        # A path without a folder is in this one; an absolute path does not change.
        self._parts = [TokenFile(path=str(folder / e.path), dtype=e.dtype, count=e.count).open() for e in files]
        self._ends = np.cumsum([each.count for each in files]).tolist()
        self.boundaries = _mapped(folder / BOUNDARIES, np.int64) if self.about.documents is not None else None
        self._trained = _mapped(folder / TRAINED, np.bool_) if self.about.masked else None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    def put(self, out: np.ndarray, start: int) -> None:
        """Fills `out` with the tokens from `start` on."""
        done = 0
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            part = self._parts[number]
            at = start + done - (self._ends[number] - len(part))
            some = part[at : at + len(out) - done]
            out[done : done + len(some)] = some
            done += len(some)
            if done == len(out):
                return

    def put_trained(self, out: np.ndarray, start: int) -> None:
        """Fills `out`, bool, with the training mask of the tokens from `start` on."""
        out[:] = True if self._trained is None else self._trained[start : start + len(out)]


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
