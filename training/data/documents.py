"""Documents of a corpus: local files and datasets, plain text and chats."""

import codecs
import gzip
import importlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...base._transformers import refusals
from ...base.errors import MissingDependency, WorkloadError, unknown
from ...base.reading import Malformed, parse_json, path_of
from .order import TrainOn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Chat = tuple[np.ndarray, np.ndarray | None]
"""Tokens of a conversation, uint32, and which of them are predicted, bool; None for all."""


def encode_conversations(tokenizer: Any, pieces: "Sequence[Piece]", train_on: TrainOn) -> list[Chat]:
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


def _marked_by_template(tokenizer: Any, pieces: "Sequence[Piece]") -> list[Chat]:
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


def _answers(tokenizer: Any, piece: "Piece", whole: str) -> list[tuple[int, int]]:
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


def _rendered(tokenizer: Any, messages: "Conversation", where: str, *, answer_follows: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    except refusals(TemplateError) as error:
        said = " ".join(str(error).split())[:300]
        raise WorkloadError(f"{where}: the chat template of {tokenizer.name_or_path} refuses it: {said}") from error
    return str(text)


def _messages(piece: "Piece") -> "Conversation":
    assert isinstance(piece.content, list)
    return piece.content


Kind = Literal["text", "jsonl", "parquet", "datasets", "tokens", "indexed"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "tokens",
    ".idx": "indexed",
}
"""Kinds by a file's ending; a `.bin` with an `.idx` beside it is `indexed`."""
GZIP = ".gz"
"""What stands behind the ending of a text or of JSON lines that gzip has compressed."""
KINDS |= {f"{ending}{GZIP}": kind for ending, kind in KINDS.items() if kind in ("text", "jsonl")}
OF_TOKENS = ("tokens", "indexed")
_ABOUT_DATA = ("readme", "license", "dataset_info", "dataset_infos", "state")
"""Names, without ending, of files that lie beside data and are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file with data, or what counts as one."""

    path: Path
    """The file; of `indexed` the `.bin`; of `datasets` the folder."""
    kind: Kind
    """What it holds."""

    def stamps(self) -> list[tuple[str, int, int]]:
        """Path, size in bytes and time of the last change in ns of each of its files: they differ where data does.

        Contents are not read for this: that takes as long as reading the data at every start. What tokens came of
        them has a digest of its own.
        """
        files = [self.path]
        if self.kind == "indexed":
            files.append(self.path.with_suffix(".idx"))
        elif self.kind == "datasets":
            files = sorted(each for each in self.path.iterdir() if each.is_file())
        try:
            about = [(os.path.abspath(each), each.stat()) for each in files]
        except OSError as error:
            raise WorkloadError(f"cannot read the data in {self.path}: {error.strerror}") from None
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in about]


def find_sources(paths: Iterable[str]) -> list[Source]:
    """The sources that files and folders hold, those of a folder by name.

    Raises:
        WorkloadError: one is not there, is of no known kind, or tokens and texts are mixed.
    """
    found = [source for path in paths for source in _sources_at(path_of(path))]
    tokens = [each for each in found if each.kind in OF_TOKENS]
    if tokens and len(tokens) < len(found):
        other = next(each for each in found if each.kind not in OF_TOKENS)
        raise WorkloadError(
            f"{tokens[0].path} holds tokens and {other.path} text; give data of one of the two, or make tokens of both"
        )
    return found


def _sources_at(path: Path) -> Iterator[Source]:
    if path.is_dir():
        yield from _in_folder(path)
    elif path.is_file():
        kind = KINDS.get(_ending(path))
        if kind is None:
            said = unknown("ending of a data file", _ending(path) or "none", KINDS)
            raise WorkloadError(f"{path}: {said}")
        yield _file(path, kind)
    elif path.with_name(path.name + ".idx").is_file():
        yield _file(path.with_name(path.name + ".bin"), "indexed")
    else:
        raise WorkloadError(f"the data file or folder {path} does not exist")


def _file(path: Path, kind: Kind) -> Source:
    if kind == "tokens" and path.with_suffix(".idx").is_file():
        kind = "indexed"
    if kind == "indexed":
        for part in (path.with_suffix(".bin"), path.with_suffix(".idx")):
            if not part.is_file():
                raise WorkloadError(f"{path}: tokens with an index need a .bin and an .idx, but {part} does not exist")
        path = path.with_suffix(".bin")
    return Source(path=path, kind=kind)


def _in_folder(folder: Path) -> Iterator[Source]:
    """What a folder holds: `datasets`, or files of one kind; of such with splits in their names, those of training."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train").is_dir():
            names = sorted(each.name for each in folder.iterdir() if each.is_dir())
            raise WorkloadError(f"{folder} has no split 'train'; give the folder of one of {', '.join(names)}")
        folder = folder / "train"
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield Source(path=folder, kind="datasets")
        return
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and _is_data(each.relative_to(folder))]
    found = list(dict.fromkeys(_file(each, KINDS[_ending(each)]) for each in files))
    if not found:
        raise WorkloadError(f"the folder {folder} holds no data: no file ends in {', '.join(KINDS)}")
    kinds = sorted({each.kind for each in found})
    if len(kinds) > 1:
        raise WorkloadError(f"the folder {folder} holds data of several kinds ({', '.join(kinds)}); name the files")
    yield from [each for each in found if each.path.name.startswith("train")] or found


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    ending = _ending(path)
    return not hidden and ending in KINDS and path.name.lower().removesuffix(ending) not in _ABOUT_DATA


def _ending(path: Path) -> str:
    """The ending of a file's name, with what is before `.gz`."""
    packed = path.suffix.lower() == GZIP
    return "".join(path.suffixes[-2:] if packed else path.suffixes[-1:]).lower()


Conversation = list[dict[str, Any]]
PIECE = 1 << 20
"""Characters after which a text is cut, where a line begins."""
ROWS = 1000
"""Of a table, read at once."""
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
"""Roles by the names that ShareGPT's conversations have for them."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    content: str | Conversation
    """Its text, never empty, or a conversation."""
    first: bool
    """Whether the document begins with it."""
    last: bool
    """Whether it ends with it."""
    where: str
    """For messages."""
    read: float
    """How much of its source is read with it, from 0 to 1."""


class BadRows:
    """Rows that cannot be read, which are left out and counted.

    Args:
        skip: whether they are; otherwise the first is refused.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip, self.count, self.first = skip, 0, ""

    def met(self, error: WorkloadError) -> None:
        """One is met.

        Raises:
            WorkloadError: it is refused.
        """
        if not self.skip:
            raise error
        self.count, self.first = self.count + 1, self.first or str(error)


def pieces_of(source: Source, field: str, bad: BadRows) -> Iterator[Piece]:
    """The documents of a source of text in its order, empty ones left out.

    Raises:
        WorkloadError: it is not UTF-8, no JSON, no table, or has no such column of texts or conversations.
        MissingDependency: what reads such files is not installed.
    """
    if source.kind == "text":
        yield from _text(source.path)
        return
    rows = {"jsonl": _json_lines, "parquet": _parquet, "datasets": _datasets}[source.kind](source.path, field)
    for where, value, read in rows:
        try:
            if isinstance(value, WorkloadError):
                raise value
            content = _content(value, field, where)
        except WorkloadError as error:
            bad.met(error)
            continue
        if content:
            yield Piece(content, True, True, where, read)


def _content(value: Any, field: str, where: str) -> str | Conversation:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_message(each, where) for each in value]
    raise WorkloadError(
        f"{where}: '{field}' must hold a text or a conversation (a list of messages), but holds {type(value).__name__}"
    )


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with a role and a content, which ShareGPT's conversations call `from` and `value`."""
    if isinstance(message, dict):
        if isinstance(message.get("role"), str) and "content" in message:
            return message
        if isinstance(message.get("from"), str) and "value" in message:
            role = SPEAKERS.get(message["from"])
            if role is None:
                raise WorkloadError(f"{where}: {unknown('speaker of a conversation', message['from'], SPEAKERS)}")
            return {"role": role, "content": message["value"]}
    found = f"has the keys {', '.join(map(str, message))}" if isinstance(message, dict) else f"is {message!r}"
    raise WorkloadError(
        f"{where}: each message of a conversation must have a role and a content, or a from and a value, but one {found[:200]}"
    )


def _missing(field: str, columns: list[str], where: str) -> WorkloadError:
    return WorkloadError(f"{where}: {unknown('field', field, columns)} Say which holds the text by --field NAME.")


# -- text ----------------------------------------------------------------------------------------------------


def _text(path: Path) -> Iterator[Piece]:
    """One document, cut where a line begins that does not begin with a space: tokenizers cut there too."""
    rest, first = "", True
    for text, read in _decoded(path):
        rest += text
        while len(rest) > 2 * PIECE:
            cut = _cut(rest)
            yield Piece(rest[:cut], first, False, str(path), read)
            rest, first = rest[cut:], False
    if rest:
        yield Piece(rest, first, True, str(path), 1.0)


def _cut(text: str) -> int:
    """Where to cut a text of more than twice `PIECE`: near there, and never at its end."""
    for sign, offset in (("\n", 1), (" ", 0)):  # a word takes the space before it along
        at = text.find(sign, PIECE, 2 * PIECE)
        while at >= 0:
            if not text[at + 1].isspace():
                return at + offset
            at = text.find(sign, at + 1, 2 * PIECE)
    return PIECE


def _decoded(path: Path) -> Iterator[tuple[str, float]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with _opened(path) as (file, share):
        while True:
            data = file.read(PIECE)
            begin = read - len(decoder.getstate()[0])
            read += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(path), error, begin) from None
            if text:
                yield text.removeprefix("\ufeff") if not begin else text, share()
            if not data:
                return


def _not_utf8(where: str, error: UnicodeDecodeError, begin: int = 0) -> WorkloadError:
    return WorkloadError(
        f"{where} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {begin + error.start}; "
        "convert it"
    )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Callable[[], float]]]:
    """A file's bytes, unpacked where gzip has packed them, and a function for how much of it is read, from 0 to 1."""
    try:
        with path.open("rb") as raw:
            size = max(1, os.fstat(raw.fileno()).st_size)
            packed = path.suffix.lower() == GZIP
            yield gzip.GzipFile(fileobj=raw) if packed else raw, lambda: min(1.0, raw.tell() / size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be unpacked by gzip: {_one_line(error)}") from None
    except OSError as error:
        raise WorkloadError(f"cannot read the data file {path}: {error.strerror}") from None


# -- tables --------------------------------------------------------------------------------------------------


def _json_lines(path: Path, field: str) -> Iterator[tuple[str, Any, float]]:
    with _opened(path) as (file, share):
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield where, _in_line(line, field, where), share()


def _in_line(line: bytes, field: str, where: str) -> Any:
    """What the field of a record holds; why there is none as the error."""
    try:
        line.decode("utf-8")
        record = parse_json(line)
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)
    except Malformed as error:
        return WorkloadError(f"{where} is no JSON: {error}; each line must be a record of its own")
    if not isinstance(record, dict):
        return WorkloadError(f"{where} must be a JSON object with the field '{field}', but is {type(record).__name__}")
    return record[field] if field in record else _missing(field, list(record), where)


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Any, float]]:
    parquet, arrow = _optional("pyarrow.parquet", "Parquet"), _optional("pyarrow", "Parquet")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise _missing(field, names, str(path))
            number = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield f"{path}, row {number - 1}", value, number / table.metadata.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise WorkloadError(f"{path} cannot be read as Parquet: {_one_line(error)}") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, row {number}", error) from None


def _datasets(path: Path, field: str) -> Iterator[tuple[str, Any, float]]:
    datasets, arrow = _optional("datasets", "datasets folders"), _optional("pyarrow", "datasets folders")
    number = 0
    try:
        table = datasets.load_from_disk(str(path))
        if field not in table.column_names:
            raise _missing(field, table.column_names, str(path))
        for batch in table.select_columns([field]).with_format(None).iter(batch_size=ROWS):
            for value in batch[field]:
                number += 1
                yield f"{path}, row {number - 1}", value, number / len(table)
    except (arrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{path} cannot be read as a datasets folder: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _optional(name: str, what: str) -> Any:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{what} are read by {package}: `pip install {package}`") from error
