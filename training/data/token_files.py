"""Files that hold tokens already: nanoGPT's `.bin`, and Megatron's `.bin` with its `.idx`.

nanoGPT's is nothing but tokens: uint16, or uint32 where the vocabulary needs it. Megatron's index (megatron.core.datasets.
indexed_dataset) begins with `MMIDIDX`, its version (uint64), a code for the tokens' type (uint8) and two counts (uint64);
then come the lengths of all sequences (int32), where each begins in the `.bin` (bytes, int64), and the number of the
sequence that each document begins with (int64), the count of sequences at the end.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import WorkloadError
from .sources import Source

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CHUNK = 1 << 22
"""Numbers that are looked at together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """Tokens in a file, as they lie there."""

    path: str
    """The file."""
    dtype: str
    """Their type, as NumPy names it."""
    count: int
    """How many."""

    def open(self) -> np.ndarray:
        """The tokens, mapped into memory."""
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,)))


def plain_tokens(source: Source, vocab_size: int) -> TokenFile:
    """The tokens of a nanoGPT file.

    Raises:
        WorkloadError: it is empty, not of whole tokens, or its tokens are wider than the vocabulary needs.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    size = source.path.stat().st_size
    if not size:
        raise WorkloadError(f"the data file {source.path} is empty: give one that holds tokens")
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


def indexed_tokens(source: Source) -> tuple[TokenFile, np.ndarray]:
    """The tokens of Megatron's files, and the tokens that their documents begin at, with the end of the last, int64.

    Raises:
        WorkloadError: the index is damaged, is not of these tokens, or does not name them in a row.
    """
    index = source.path.with_suffix(".idx")
    data = np.memmap(index, dtype=np.uint8, mode="r") if index.stat().st_size >= _HEADER.size else np.zeros(0, np.uint8)
    magic, version, code, sequences, marks = (
        _HEADER.unpack(data[: _HEADER.size].tobytes()) if len(data) else (b"", 0, 0, 0, 0)
    )
    if magic != _MAGIC:
        raise WorkloadError(f"{index} is no index of Megatron's: it does not begin with MMIDIDX")
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
            "belong together"
        )
    if not count:
        raise WorkloadError(f"the data file {source.path} is empty: give one that holds tokens")
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
    """How many tokens the sequences have, each of which must begin where the one before ends."""
    count = 0
    for at in range(0, len(lengths), CHUNK):
        some = np.asarray(lengths[at : at + CHUNK], dtype=np.int64)
        ends = count + np.cumsum(some)
        if (some < 0).any() or not np.array_equal(pointers[at : at + CHUNK], (ends - some) * itemsize):
            raise WorkloadError(f"{index}: its sequences do not follow each other in the .bin; build the files anew")
        count = int(ends[-1])
    return count


def chunks(file: TokenFile, vocab_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """The tokens of a file a chunk at a time, with the number of each chunk's first.

    Raises:
        WorkloadError: a token is not of the vocabulary.
    """
    tokens: Any = file.open()
    for at in range(0, file.count, CHUNK):
        some = tokens[at : at + CHUNK]
        for wrong in (int(some.max()), int(some.min())):
            if not 0 <= wrong < vocab_size:
                raise WorkloadError(
                    f"{file.path} holds token {wrong}, but the model's vocabulary has {vocab_size}; they do not belong "
                    "together"
                )
        yield at, some
