"""Tokens, document boundaries and what is trained on, in files: how they are written, and read through memory maps."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import WorkloadError
from .cache import read_about
from .encoder import Encoded, Encoder
from .token_files import TokenFile, chunks

TOKENS, BOUNDARIES, TRAINED = "tokens.bin", "boundaries.bin", "trained.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a store holds."""

    parts: list[dict[str, Any]]
    """The files of the tokens in their order, as `TokenFile`; a path without a folder is in the store's own."""
    tokens: int
    """How many."""
    documents: int | None
    """How many; None where it is not known where they begin."""
    largest: int
    """The largest id."""
    digest: str
    """SHA-256 of tokens, boundaries and what is trained on, hex: another where anything that is trained on is another."""
    masked: bool
    """Whether some tokens are not trained on."""
    conversations: bool
    """Whether the documents are conversations."""
    end_id: int | None
    """The token that ends a text."""
    pad_id: int | None
    """The tokenizer's padding."""
    mask_id: int | None
    """The tokenizer's mask."""
    skipped: int = 0
    """Rows that could not be read, and were left out as asked."""
    first_skipped: str = ""
    """What is wrong with the first of them."""


def write_texts(
    folder: Path, pieces: Iterable[Encoded], encoder: Encoder, *, vocab_size: int, conversations: bool, masked: bool
) -> dict[str, Any]:
    """Writes the tokens of texts as they come, and says what the store holds.

    Raises:
        WorkloadError: there is no token, or one that is not of the vocabulary.
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
                    f"has {vocab_size}; they do not belong together"
                )
            put(0, token_file, piece.tokens.astype(encoder.dtype))
            tokens += len(piece.tokens)
            if masked:
                put(2, trained_file, np.ones(len(piece.tokens), bool) if piece.trained is None else piece.trained)
            if piece.last:
                documents += 1
                put(1, boundary_file, np.array([tokens], dtype=np.int64))
    if not masked:
        (folder / TRAINED).unlink()
    about = About(
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
    heard: Callable[[float], None],
) -> dict[str, Any]:
    """Looks through files of tokens, which stay where they are, and says what the store holds.

    Args:
        folder: where document boundaries are written.
        files: with the tokens that documents begin at and the end of the last, where that is known.
        vocab_size: ids are below.
        end_id: the token that ends a document in files of which that is not known.
        pad_id: as in `About`.
        mask_id: as in `About`.
        heard: told which share of the tokens is looked through, from 0 to 1.

    Raises:
        WorkloadError: a token is not of the vocabulary.
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
                heard((total + at) / everything)
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
    about = About(
        parts=[asdict(file) for file, _ in files], tokens=total, documents=documents if known else None,
        largest=largest, digest=_together(hashes), masked=False, conversations=False, end_id=end_id, pad_id=pad_id,
        mask_id=mask_id,
    )  # fmt: skip
    return asdict(about)


def _together(hashes: Sequence[Any]) -> str:
    return hashlib.sha256("".join(each.hexdigest() for each in hashes).encode()).hexdigest()


class TokenStore:
    """Tokens in a row, in one file or several, mapped into memory; it pickles as its folder.

    Args:
        folder: what `write_texts` or `write_about_tokens` filled.
    """

    about: About
    """What it holds."""
    boundaries: np.ndarray | None
    """The tokens that documents begin at, and the end of the last, int64, shape [documents + 1]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        known = read_about(folder)
        self.about = About(**{name: known[name] for name in About.__dataclass_fields__ if name in known})
        files = [TokenFile(**part) for part in self.about.parts]
        # A path without a folder is in this one; an absolute one stays what it is.
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
        """Fills `out`, bool, with which of the tokens from `start` on are trained on."""
        out[:] = True if self._trained is None else self._trained[start : start + len(out)]


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
