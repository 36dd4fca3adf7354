"""Converts rows of a corpus to tokens."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base._transformers import refusals
from ...base.errors import WorkloadError
from ...models.architecture import one_line
from ...models.data import BYTE_OFFSET, load_tokenizer
from .corpus import LABELS, TOKENS
from .order import BYTES, TrainOn

_END_OF_BYTES = 1  # as in ByT5, whose bytes start at BYTE_OFFSET
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a tokenizer's folder that determine its tokens."""
_QUIET: Mapping[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
Rows = Mapping[str, Sequence[Any]]
"""Rows of a data set, by column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A tokenizer, or bytes. Its methods return the columns `tokens`, `trained` (1 for predicted tokens, uint8) and
    `last` (True if a document ends there), a row for each document or piece that is not empty.
    """

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

    def texts(self, rows: Rows) -> dict[str, list[Any]]:
        """Encodes rows of `text`, with `first` and `last` for a piece of a document: True if it begins or ends it."""
        texts = rows["text"]
        if None in texts:
            raise WorkloadError("a row has no text: its value is null; leave such rows out")
        not_empty = [number for number, document in enumerate(texts) if document]
        complete = [True] * len(texts)
        begins, ends = rows.get("first", complete), rows.get("last", complete)
        encoded: dict[str, list[Any]] = {"tokens": [], "trained": [], "last": []}
        for number, ids in zip(not_empty, self._ids([texts[number] for number in not_empty])):
            tokens = np.concatenate(
                [np.asarray(ids_of_part, dtype=np.uint32) for ids_of_part in
                 (self.prefix if begins[number] else (), ids, self.suffix if ends[number] else ())]
            )  # fmt: skip
            encoded["tokens"].append(tokens)
            encoded["trained"].append(np.ones(len(tokens), dtype=np.uint8))
            encoded["last"].append(ends[number])
        return encoded

    def _ids(self, texts: list[str]) -> list[Any]:
        if self.tokenizer is None:
            return [
                np.frombuffer(document.encode("utf-8"), dtype=np.uint8).astype(np.uint32) + BYTE_OFFSET
                for document in texts
            ]
        return list(self.tokenizer(texts, add_special_tokens=False, **_QUIET)["input_ids"]) if texts else []

    def conversations(self, rows: Rows, train_on: TrainOn) -> dict[str, list[Any]]:
        """Encodes rows of `messages` by the chat template, which writes all special tokens.

        Raises:
            WorkloadError: there is no template, it refuses a conversation, or it does not mark the assistant's tokens.
        """
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise WorkloadError(
                f"the tokenizer in {self.name} has no chat template; give a tokenizer with one, or a field that contains text"
            )
        if train_on == "assistant" and not _GENERATION.search(self.tokenizer.get_chat_template()):
            raise WorkloadError(
                f"the chat template of {self.name} does not mark the assistant's tokens by "
                "{% generation %}: give train_on=all, a tokenizer with such a template, or a data set with the columns "
                f"'{TOKENS}' and '{LABELS}'"
            )
        encoded: dict[str, list[Any]] = {"tokens": [], "trained": [], "last": []}
        for messages in rows["messages"]:
            try:
                written = self.tokenizer.apply_chat_template(
                    # A table has all keys in all messages.
                    [{key: value for key, value in message.items() if value is not None} for message in messages],
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=train_on == "assistant",
                    tokenizer_kwargs={"verbose": False},
                )
            except refusals(TemplateError) as error:
                raise WorkloadError(
                    f"the chat template of {self.name} refuses a conversation: {one_line(error)}; it begins with "
                    f"{str(messages)[:200]}"
                ) from error
            tokens = np.asarray(written["input_ids"], dtype=np.uint32)
            trained = written["assistant_masks"] if train_on == "assistant" else np.ones(len(tokens))
            encoded["tokens"].append(tokens)
            encoded["trained"].append(np.asarray(trained, dtype=np.uint8))
            encoded["last"].append(True)
        return encoded


def encoded_tokens(rows: Rows) -> dict[str, list[Any]]:
    """Returns rows of `input_ids`, and of `labels` if there are any, with the columns of `Encoder`.

    Raises:
        WorkloadError: a label is neither its token nor -100.
    """
    tokens = [np.asarray(ids, dtype=np.int64) for ids in rows[TOKENS]]
    trained = [np.ones(len(ids), dtype=np.uint8) for ids in tokens]
    if LABELS in rows:
        trained = []
        for ids, row_labels in zip(tokens, rows[LABELS]):
            labels = np.asarray(row_labels, dtype=np.int64)
            if labels.shape != ids.shape or ((labels != ids) & (labels != -100)).any():
                raise WorkloadError(
                    f"'{LABELS}' must be those of '{TOKENS}', or -100 for tokens that are not predicted"
                )
            trained.append((labels != -100).astype(np.uint8))
    if any(len(ids) and ids.min() < 0 for ids in tokens):
        raise WorkloadError(f"'{TOKENS}' has a negative number")
    return {
        "tokens": [ids.astype(np.uint32) for ids in tokens],
        "trained": trained,
        "last": [True] * len(tokens),
    }


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
        name=folder, tokenizer=tokenizer, size=max(tokenizer.get_vocab().values()) + 1, prefix=prefix, suffix=suffix,
        end_id=end, pad_id=tokenizer.pad_token_id, mask_id=tokenizer.mask_token_id,
    )  # fmt: skip


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special tokens that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a")["input_ids"]
    for begin in range(len(with_special) - len(plain) + 1):
        if with_special[begin : begin + len(plain)] == plain:
            return tuple(with_special[:begin]), tuple(with_special[begin + len(plain) :])
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
