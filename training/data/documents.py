"""Documents read from files, a piece at a time: never more than a few MiB of them are in memory."""

import codecs
import gzip
import importlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import MissingDependency, WorkloadError, unknown
from ...base.reading import Malformed, parse_json
from .sources import GZIP, Source

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
