"""Converts documents to tokens."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import WorkloadError
from ...models.data import BYTE_OFFSET, load_tokenizer
from .documents import BadRows, Chat, Piece, encode_conversations
from .order import BYTES, TrainOn

BATCH_CHARACTERS = 1 << 21
"""Number of characters that are tokenised at once: enough for all threads of a fast tokenizer."""
BATCH_PIECES = 1000
_END_OF_BYTES = 1
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a tokenizer's folder that determine its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A tokenizer, or bytes."""

    name: str
    """`bytes`, or the folder."""
    tokenizer: Any
    """Tokenizer of transformers; None for bytes."""
    size: int
    """All ids are smaller."""
    prefix: tuple[int, ...]
    """Tokens before each text, such as the beginning of a sequence."""
    suffix: tuple[int, ...]
    """Tokens after each text: the tokenizer's own, and always the end-of-text token if there is one."""
    end_id: int | None
    """Token that ends a text."""
    pad_id: int | None
    mask_id: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smaller of uint16 and uint32 that can represent the ids."""
        return np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)

    def encode(self, texts: list[str]) -> Iterator[Sequence[int] | np.ndarray]:
        """Yields the tokens of texts, without prefix and suffix."""
        if self.tokenizer is None:
            for text in texts:
                yield np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) + BYTE_OFFSET
            return
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        yield from self.tokenizer(texts, add_special_tokens=False, **options)["input_ids"] if texts else ()


def encoder_of(folder: str | None) -> Encoder:
    """Returns the encoder of a tokenizer's folder, or that of bytes for None or `bytes`.

    Raises:
        WorkloadError: the folder contains no tokenizer, or one that cannot be loaded.
    """
    if folder is None or folder == BYTES:
        return Encoder(
            name=BYTES, tokenizer=None, size=256 + BYTE_OFFSET, prefix=(), suffix=(_END_OF_BYTES,),
            end_id=_END_OF_BYTES, pad_id=0, mask_id=None,
        )  # fmt: skip
    tokenizer = load_tokenizer(Path(folder)) if Path(folder).is_dir() else None
    if tokenizer is None:
        raise WorkloadError(f"{folder} contains no tokenizer; give the folder that its tokenizer.json is in")
    # Older classes have another token at the end of a text: the separator.
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    prefix, suffix = _special_tokens(tokenizer)
    if end is not None and end not in suffix[-1:]:
        suffix = (*suffix, end)
    return Encoder(
        name=folder, tokenizer=tokenizer, size=max(tokenizer.get_vocab().values()) + 1, prefix=prefix, suffix=suffix, end_id=end,
        pad_id=tokenizer.pad_token_id, mask_id=tokenizer.mask_token_id,
    )  # fmt: skip


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special tokens that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return tuple(whole[:at]), tuple(whole[at + len(plain) :])
    raise WorkloadError(
        f"the tokenizer in {tokenizer.name_or_path} makes other tokens of a text where it marks its ends"
    )


def tokenizer_digest(folder: str | None) -> str:
    """SHA-256 of the files that determine the tokens, hex; `bytes` without a tokenizer."""
    if folder is None or folder == BYTES:
        return BYTES
    total = hashlib.sha256()
    for name in _FILES:
        if (file := Path(folder) / name).is_file():
            total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Tokens of a piece."""

    tokens: np.ndarray
    """One dimension, including special tokens."""
    trained: np.ndarray | None
    """Mask of the tokens that are predicted in training, bool; None for all."""
    last: bool
    """True if a document ends with it."""
    where: str
    """Location of the piece, for messages."""


def encoded(pieces: Iterable[Piece], encoder: Encoder, train_on: TrainOn, bad: BadRows) -> Iterator[Encoded]:
    """Reads and tokenises pieces in batches. Conversations that cannot be written as text are bad rows.

    Raises:
        WorkloadError: texts and conversations are mixed, or a conversation cannot be written as text.
    """
    conversations: bool | None = None
    for batch in _batches(pieces):
        kinds = [isinstance(each.content, list) for each in batch]
        conversations = kinds[0] if conversations is None else conversations
        if conversations is not all(kinds) or conversations is not any(kinds):
            other = batch[kinds.index(not conversations)]
            first = "conversations" if conversations else "texts"
            raise WorkloadError(
                f"{other.where}: the data has {first} before this, and {type(other.content).__name__} here"
            )
        if conversations:
            for piece, (tokens, trained) in _chats(encoder, batch, train_on, bad):
                yield Encoded(tokens=tokens, trained=trained, last=True, where=piece.where)
            continue
        for piece, ids in zip(batch, encoder.encode([str(each.content) for each in batch])):
            parts = (encoder.prefix if piece.first else (), ids, encoder.suffix if piece.last else ())
            tokens = np.concatenate([np.asarray(part, dtype=encoder.dtype) for part in parts])
            yield Encoded(tokens=tokens, trained=None, last=piece.last, where=piece.where)


def _chats(encoder: Encoder, batch: list[Piece], train_on: TrainOn, bad: BadRows) -> Iterator[tuple[Piece, Chat]]:
    try:
        yield from zip(batch, encode_conversations(encoder.tokenizer, batch, train_on))
        return
    except WorkloadError as error:
        if not bad.skip:
            raise error
    for piece in batch:  # one of them is bad
        try:
            (chat,) = encode_conversations(encoder.tokenizer, [piece], train_on)
        except WorkloadError as error:
            bad.met(error)
        else:
            yield piece, chat


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        if isinstance(piece.content, str):
            held += len(piece.content)
        else:
            held += sum(len(str(message["content"])) for message in piece.content)
        if held >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
