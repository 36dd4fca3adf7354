"""Conversations as tokens, by a tokenizer's chat template, and what in them the assistant says."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base._transformers import refusals
from ...base.errors import WorkloadError
from .documents import Conversation, Piece
from .plan import TrainOn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Chat = tuple[np.ndarray, np.ndarray | None]
"""Tokens of a conversation, uint32, and which of them are predicted, bool; None for all."""


def encode_conversations(tokenizer: Any, pieces: Sequence[Piece], train_on: TrainOn) -> list[Chat]:
    """Conversations as tokens; the template writes all special tokens.

    What the assistant says is what the template marks with `{% generation %}`. Where it marks nothing, it is what a
    message of the assistant adds to the text up to where its answer begins, up to its end.

    Raises:
        WorkloadError: there is no template, it refuses a conversation, or where an answer begins and ends cannot be told.
    """
    template = None if tokenizer is None else tokenizer.chat_template
    if not template:
        whose = "text by bytes" if tokenizer is None else f"the tokenizer in {tokenizer.name_or_path}"
        raise WorkloadError(
            f"{pieces[0].where} is a conversation, but {whose} has no chat template; give a tokenizer with one, or a "
            "field that holds text"
        )
    if train_on == "assistant" and not tokenizer.is_fast:
        raise WorkloadError(
            f"the tokenizer in {tokenizer.name_or_path} does not tell which characters a token is made of, by which the "
            "assistant's are found; give train_on=all, or a tokenizer with a tokenizer.json"
        )
    if train_on == "assistant" and _GENERATION.search(tokenizer.get_chat_template()):
        return _marked_by_template(tokenizer, pieces)
    whole = [_rendered(tokenizer, _messages(piece), piece.where) for piece in pieces]
    spans = [
        _answers(tokenizer, piece, text) if train_on == "assistant" else None for piece, text in zip(pieces, whole)
    ]
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=train_on == "assistant", **options)
    out: list[Chat] = []
    for number, found in enumerate(spans):
        ids = np.asarray(made["input_ids"][number], dtype=np.uint32)
        out.append((ids, None if found is None else _within(made["offset_mapping"][number], found)))
    return out


def _marked_by_template(tokenizer: Any, pieces: Sequence[Piece]) -> list[Chat]:
    conversations = [_messages(piece) for piece in pieces]
    for piece, conversation in zip(pieces, conversations):
        _rendered(tokenizer, conversation, piece.where)  # the batch below would not say which one is refused
    made = tokenizer.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )  # fmt: skip
    return [
        (np.asarray(ids, dtype=np.uint32), np.asarray(mask, dtype=bool))
        for ids, mask in zip(made["input_ids"], made["assistant_masks"])
    ]


def _answers(tokenizer: Any, piece: Piece, whole: str) -> list[tuple[int, int]]:
    """Where in a conversation's text the assistant's messages begin and end, in characters."""
    messages = _messages(piece)
    out = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:number], piece.where, answer_follows=True) if number else ""
        until = _rendered(tokenizer, messages[: number + 1], piece.where)
        if not (until.startswith(before) and whole.startswith(until)):
            raise WorkloadError(
                f"{piece.where}: the chat template of {tokenizer.name_or_path} writes message {number} in another way "
                "where others follow, so that what the assistant says cannot be told; mark it in the template with "
                "{% generation %}, or give train_on=all"
            )
        out.append((len(before), len(until)))
    return out


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Of tokens that reach from one character to another, those that lie in spans; bool."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    out = np.zeros(len(begins), dtype=bool)
    for first, last in spans:
        out |= (begins >= first) & (ends <= last) & (ends > begins)
    return out


def _rendered(tokenizer: Any, messages: Conversation, where: str, *, answer_follows: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    except refusals(TemplateError) as error:
        said = " ".join(str(error).split())[:300]
        raise WorkloadError(f"{where}: the chat template of {tokenizer.name_or_path} refuses it: {said}") from error
    return str(text)


def _messages(piece: Piece) -> Conversation:
    assert isinstance(piece.content, list)
    return piece.content
