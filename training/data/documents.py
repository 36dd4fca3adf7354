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
from ...models.architecture import one_line
from .order import TrainOn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Chat = tuple[np.ndarray, np.ndarray | None]
"""Tokens of a conversation, uint32, and a mask of the predicted ones, bool; None for all."""


def encode_conversations(tokenizer: Any, pieces: "Sequence[Piece]", train_on: TrainOn) -> list[Chat]:
    """Converts conversations to tokens. The chat template writes all special tokens.

    The assistant's tokens are those that the template marks with `{% generation %}`. Without such marks, they are what
    a message of the assistant adds after the generation prompt, up to its end.

    Raises:
        WorkloadError: there is no template, it refuses a conversation, or the bounds of an answer cannot be
            determined.
    """
    template = None if tokenizer is None else tokenizer.chat_template
    if not template:
        source = "text by bytes" if tokenizer is None else f"the tokenizer in {tokenizer.name_or_path}"
        raise WorkloadError(
            f"{pieces[0].where} is a conversation, but {source} has no chat template; give a tokenizer with one, or a "
            "field that contains text"
        )
    if train_on == "assistant" and not tokenizer.is_fast:
        raise WorkloadError(
            f"the tokenizer in {tokenizer.name_or_path} does not map tokens to characters, which is needed to find the "
            "assistant's tokens; give train_on=all, or a tokenizer with a tokenizer.json"
        )
    if train_on == "assistant" and _GENERATION.search(tokenizer.get_chat_template()):
        return _marked_by_template(tokenizer, pieces)
    whole = [_rendered(tokenizer, _messages(piece), piece.where) for piece in pieces]
    spans = [
        _answers(tokenizer, piece, text) if train_on == "assistant" else None for piece, text in zip(pieces, whole)
    ]
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=train_on == "assistant", **options)
    out: list[Chat] = []
    for number, found in enumerate(spans):
        ids = np.asarray(encoded["input_ids"][number], dtype=np.uint32)
        out.append((ids, None if found is None else _span_mask(encoded["offset_mapping"][number], found)))
    return out


def _marked_by_template(tokenizer: Any, pieces: "Sequence[Piece]") -> list[Chat]:
    conversations = [_messages(piece) for piece in pieces]
    for piece, conversation in zip(pieces, conversations):
        _rendered(tokenizer, conversation, piece.where)  # the batch below would not report which one is refused
    rendered = tokenizer.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )  # fmt: skip
    return [
        (np.asarray(ids, dtype=np.uint32), np.asarray(mask, dtype=bool))
        for ids, mask in zip(rendered["input_ids"], rendered["assistant_masks"])
    ]


def _answers(tokenizer: Any, piece: "Piece", whole: str) -> list[tuple[int, int]]:
    """Start and end of the assistant's messages in a conversation's text, in characters."""
    messages = _messages(piece)
    out = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:number], piece.where, answer_follows=True) if number else ""
        until = _rendered(tokenizer, messages[: number + 1], piece.where)
        if not (until.startswith(before) and whole.startswith(until)):
            raise WorkloadError(
                f"{piece.where}: the chat template of {tokenizer.name_or_path} writes message {number} differently "
                "if others follow, so the assistant's part cannot be found; mark it in the template with "
                "{% generation %}, or give train_on=all"
            )
        out.append((len(before), len(until)))
    return out


def _span_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Mask of the tokens, given by their character ranges, that lie in `spans`; bool."""
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
        text = f"{where}: the chat template of {tokenizer.name_or_path} refuses it: {one_line(error)}"
        raise WorkloadError(text) from error
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
"""Kinds of data by file ending; a `.bin` with an `.idx` beside it is `indexed`."""
GZIP = ".gz"
"""Further ending of text or JSON lines compressed by gzip."""
KINDS |= {f"{ending}{GZIP}": kind for ending, kind in KINDS.items() if kind in ("text", "jsonl")}
OF_TOKENS = ("tokens", "indexed")
_OTHER_SPLITS = {"valid", "validation", "val", "test", "eval", "dev"}
"""First words of the names of files that are not for training."""
_ABOUT_DATA = ("readme", "license", "dataset_info", "dataset_infos", "state")
"""Names, without ending, of files beside data that are not data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A data file, or a folder that counts as one."""

    path: Path
    """The file; for `indexed` the `.bin`; for `datasets` the folder."""
    kind: Kind

    def stamps(self) -> list[tuple[str, int, int]]:
        """Path, size in bytes and time of the last change in ns of each of its files, to detect changed data.

        Contents are not read, because that would take as long as reading the data at every start. The tokens made from
        them have their own digest.
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


def find_sources(paths: Iterable[str]) -> list[DataFile]:
    """Sources in files and folders, those of a folder by name.

    Raises:
        WorkloadError: a path does not exist, is of an unknown kind, or tokens and texts are mixed.
    """
    found = [source for path in paths for source in _sources_at(path_of(path))]
    tokens = [each for each in found if each.kind in OF_TOKENS]
    if tokens and len(tokens) < len(found):
        other = next(each for each in found if each.kind not in OF_TOKENS)
        raise WorkloadError(
            f"{tokens[0].path} contains tokens and {other.path} text; give data of one kind, or tokenise both"
        )
    return found


def _sources_at(path: Path) -> Iterator[DataFile]:
    if path.is_dir():
        yield from _in_folder(path)
    elif path.is_file():
        kind = KINDS.get(_ending(path))
        if kind is None:
            problem = unknown("ending of a data file", _ending(path) or "none", KINDS)
            raise WorkloadError(f"{path}: {problem}")
        yield _file(path, kind)
    elif path.with_name(path.name + ".idx").is_file():
        yield _file(path.with_name(path.name + ".bin"), "indexed")
    else:
        raise WorkloadError(f"the data file or folder {path} does not exist")


def _file(path: Path, kind: Kind) -> DataFile:
    if kind == "tokens" and path.with_suffix(".idx").is_file():
        kind = "indexed"
    if kind == "indexed":
        for part in (path.with_suffix(".bin"), path.with_suffix(".idx")):
            if not part.is_file():
                raise WorkloadError(f"{path}: tokens with an index need a .bin and an .idx, but {part} does not exist")
        path = path.with_suffix(".bin")
    return DataFile(path=path, kind=kind)


def _in_folder(folder: Path) -> Iterator[DataFile]:
    """Yields the sources of a folder: `datasets`, or files of one kind; if their names begin with those of splits, only
    those of training.
    """
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train").is_dir():
            names = sorted(each.name for each in folder.iterdir() if each.is_dir())
            raise WorkloadError(f"{folder} has no split 'train'; give the folder of one of {', '.join(names)}")
        folder = folder / "train"
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield DataFile(path=folder, kind="datasets")
        return
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and _is_data(each.relative_to(folder))]
    found = list(dict.fromkeys(_file(each, KINDS[_ending(each)]) for each in files))
    if not found:
        raise WorkloadError(f"the folder {folder} contains no data: no file ends in {', '.join(KINDS)}")
    kinds = sorted({each.kind for each in found})
    if len(kinds) > 1:
        raise WorkloadError(f"the folder {folder} contains data of several kinds ({', '.join(kinds)}); name the files")
    splits = {each.path: re.split(r"[-_.]", each.path.name.lower())[0] for each in found}
    training = [each for each in found if splits[each.path] in ("train", "training")]
    yield from training if training and _OTHER_SPLITS & set(splits.values()) else found


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    ending = _ending(path)
    return not hidden and ending in KINDS and path.name.lower().removesuffix(ending) not in _ABOUT_DATA


def _ending(path: Path) -> str:
    """Ending of a file's name, including what precedes `.gz`."""
    packed = path.suffix.lower() == GZIP
    return "".join(path.suffixes[-2:] if packed else path.suffixes[-1:]).lower()


Conversation = list[dict[str, Any]]
PIECE = 1 << 20
"""Number of characters after which a text is cut at the next start of a line."""
ROWS = 1000
"""Number of rows of a table that are read at once."""
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
"""Roles by the names used in ShareGPT's conversations."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    content: str | Conversation
    """Its text, never empty, or a conversation."""
    first: bool
    """True if the document begins with it."""
    last: bool
    """True if the document ends with it."""
    where: str
    """Location, for messages."""
    read: float
    """Share of its source that is read up to its end, from 0 to 1."""


class BadRows:
    """Counts rows that cannot be read and are skipped.

    Args:
        skip: skip them; otherwise the first one is refused.
    """

    def __init__(self, skip: bool = False) -> None:
        self.skip, self.count, self.first = skip, 0, ""

    def met(self, error: WorkloadError) -> None:
        """Handles a bad row.

        Raises:
            WorkloadError: it is refused.
        """
        if not self.skip:
            raise error
        self.count, self.first = self.count + 1, self.first or str(error)


def pieces_of(source: DataFile, field: str, bad: BadRows) -> Iterator[Piece]:
    """Yields the non-empty documents of a text source in order.

    Raises:
        WorkloadError: it is not UTF-8, JSON or a table, or has no such column of texts or conversations.
        MissingDependency: the package that reads such files is not installed.
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
        f"{where}: '{field}' must contain a text or a conversation (a list of messages), but contains {type(value).__name__}"
    )


def _message(message: Any, where: str) -> dict[str, Any]:
    """Converts a message to one with a role and a content, which ShareGPT's conversations call `from` and `value`."""
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
    return WorkloadError(f"{where}: {unknown('field', field, columns)} Name the one with the text by --field NAME.")


# -- text ----------------------------------------------------------------------------------------------------


def _text(path: Path) -> Iterator[Piece]:
    """Yields one document, cut at starts of lines without leading space, where tokenizers cut too."""
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
    """Position at which to cut a text of more than twice `PIECE`: close to that, and never at its end."""
    for sign, offset in (("\n", 1), (" ", 0)):  # a word keeps its leading space
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
    """Opens a file, decompressed if it ends in `.gz`, and a function that returns the share that is read, from 0 to 1."""
    try:
        with path.open("rb") as raw:
            size = max(1, os.fstat(raw.fileno()).st_size)
            packed = path.suffix.lower() == GZIP
            yield gzip.GzipFile(fileobj=raw) if packed else raw, lambda: min(1.0, raw.tell() / size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be unpacked by gzip: {one_line(error)}") from None
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
    """Value of the field of a record, or the error."""
    try:
        line.decode("utf-8")
        record = parse_json(line)
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)
    except Malformed as error:
        return WorkloadError(f"{where} is not JSON: {error}; each line must be a record")
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
        raise WorkloadError(f"{path} cannot be read as Parquet: {one_line(error)}") from None
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
        raise WorkloadError(f"{path} cannot be read as a datasets folder: {one_line(error)}") from error


def _optional(name: str, what: str) -> Any:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{what} are read by {package}: `pip install {package}`") from error
