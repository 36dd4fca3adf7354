"""Documents read from files, a piece at a time: never more than a few MiB of them are in memory."""

import codecs
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import MissingDependency, WorkloadError, unknown
from ...reading import Refused, parse_json
from .sources import Source

Conversation = list[dict[str, Any]]
PIECE = 1 << 20
"""Characters after which a text is cut, where a line begins."""
ROWS = 1000
"""Of a table, read at once."""


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


def pieces_of(source: Source, field: str) -> Iterator[Piece]:
    """The documents of a source of text in its order, empty ones left out.

    Raises:
        WorkloadError: it is not UTF-8, no JSON, no table, or has no such column of texts or conversations.
        MissingDependency: what reads such files is not installed.
    """
    if source.kind == "text":
        yield from _text(source.path)
        return
    rows = {"jsonl": _json_lines, "parquet": _parquet, "datasets": _datasets}[source.kind](source.path, field)
    for where, value in rows:
        content = _content(value, field, where)
        if content:
            yield Piece(content, True, True, where)


def _content(value: Any, field: str, where: str) -> str | Conversation:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                known = (
                    f"has the keys {', '.join(map(str, message))}" if isinstance(message, dict) else f"is {message!r}"
                )
                raise WorkloadError(
                    f"{where}: each message of a conversation must have a role and a content, but one {known[:200]}"
                )
        return value
    raise WorkloadError(
        f"{where}: '{field}' must hold a text or a conversation (a list of messages), but holds {type(value).__name__}"
    )


def _missing(field: str, columns: list[str], where: str) -> WorkloadError:
    return WorkloadError(f"{where}: {unknown('field', field, columns)} Say which holds the text by field=NAME.")


# -- text ----------------------------------------------------------------------------------------------------


def _text(path: Path) -> Iterator[Piece]:
    """One document, cut where a line begins that does not begin with a space: tokenizers cut there too."""
    rest, first = "", True
    for text in _decoded(path):
        rest += text
        while len(rest) > 2 * PIECE:
            cut = _cut(rest)
            yield Piece(rest[:cut], first, False, str(path))
            rest, first = rest[cut:], False
    if rest:
        yield Piece(rest, first, True, str(path))


def _cut(text: str) -> int:
    """Where to cut a text of more than twice `PIECE`: near there, and never at its end."""
    for sign, offset in (("\n", 1), (" ", 0)):  # a word takes the space before it along
        at = text.find(sign, PIECE, 2 * PIECE)
        while at >= 0:
            if not text[at + 1].isspace():
                return at + offset
            at = text.find(sign, at + 1, 2 * PIECE)
    return PIECE


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with _opened(path) as file:
        while True:
            data = file.read(PIECE)
            begin = read - len(decoder.getstate()[0])
            read += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(path), error, begin) from None
            if text:
                yield text.removeprefix("\ufeff") if not begin else text
            if not data:
                return


def _not_utf8(where: str, error: UnicodeDecodeError, begin: int = 0) -> WorkloadError:
    return WorkloadError(
        f"{where} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {begin + error.start}; "
        "convert it"
    )


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise WorkloadError(f"cannot read the data file {path}: {error.strerror}") from None


# -- tables --------------------------------------------------------------------------------------------------


def _json_lines(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                line.decode("utf-8")
                record = parse_json(line)
            except UnicodeDecodeError as error:
                raise _not_utf8(where, error) from None
            except Refused as error:
                raise WorkloadError(f"{where} is no JSON: {error}; each line must be a record of its own") from None
            if not isinstance(record, dict):
                raise WorkloadError(
                    f"{where} must be a JSON object with the field '{field}', but is {type(record).__name__}"
                )
            if field not in record:
                raise _missing(field, list(record), where)
            yield where, record[field]


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    parquet, arrow = _optional("pyarrow.parquet", "Parquet"), _optional("pyarrow", "Parquet")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise _missing(field, names, str(path))
            number = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield f"{path}, row {number}", value
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise WorkloadError(f"{path} cannot be read as Parquet: {_one_line(error)}") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, row {number}", error) from None


def _datasets(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    datasets, arrow = _optional("datasets", "datasets folders"), _optional("pyarrow", "datasets folders")
    number = 0
    try:
        table = datasets.load_from_disk(str(path))
        if field not in table.column_names:
            raise _missing(field, table.column_names, str(path))
        for batch in table.select_columns([field]).with_format(None).iter(batch_size=ROWS):
            for value in batch[field]:
                yield f"{path}, row {number}", value
                number += 1
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
