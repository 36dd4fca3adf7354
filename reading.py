"""Reading what strangers wrote: regular files only, inside their folder only, measured before they are parsed.

Whatever a file holds, reading it ends within two seconds and 200 MiB of memory, with its data or with a refusal in
words. docs/security.md says what is trusted and what is not.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from .errors import UsageError

LARGEST_DOCUMENT = 2 << 20
"""Bytes of a YAML document."""
MOST_NODES = 100_000
"""Scalars, lists and mappings of a YAML document, those that an alias repeats counted again."""
DEEPEST = 100
"""Lists and mappings inside each other."""
LONGEST_NUMBER = 400
"""Characters of a number: the widest float written out has 325 places."""
LONGEST_PATH, LONGEST_NAME = 4096, 255
"""Bytes of a path and of each name in it (path_resolution(7), Linux)."""


class Refused(ValueError):
    """What was read is damaged, or `TooMuch`; says in what."""


class TooMuch(Refused):
    """It is larger or deeper than anything that redline writes."""


class Outside(OSError):
    """A path leads out of its folder, through a link, or to something that is no regular file."""


@contextlib.contextmanager
def open_inside(folder: Path, relative: str) -> Iterator[BinaryIO]:
    """Opens the file `relative` of `folder` for reading, unbuffered by anything but Python.

    Each step of the path is opened from the one before and refuses links (openat(2), O_NOFOLLOW), so that
    nothing changes between the check and the use. A pipe or device is refused rather than waited for.

    Args:
        folder: what the path must stay inside; may itself be reached through links.
        relative: path from there, with `/`.

    Raises:
        Outside: the path is absolute, contains `..`, meets a link, or is no regular file.
        OSError: it is not there or cannot be read.
    """
    parts = PurePosixPath(relative).parts
    try:
        plain = b"\0" not in os.fsencode(relative)
    except UnicodeEncodeError:
        plain = False
    if not parts or not plain or relative.startswith("/") or ".." in parts:
        raise Outside(f"'{relative}' is not inside the folder")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, start=1):
            try:
                below = os.open(part, flags | (os.O_DIRECTORY if number < len(parts) else 0), dir_fd=at)
            except OSError as error:
                if _is_link(part, at):
                    raise Outside(f"'{relative}' is a symbolic link or lies behind one") from error
                raise
            os.close(at)
            at = below
        if not stat.S_ISREG(os.fstat(at).st_mode):
            raise Outside(f"'{relative}' is not a regular file")
        file = os.fdopen(at, "rb")
        at = -1
    finally:
        if at >= 0:
            os.close(at)
    with file:
        yield file


def read_inside(folder: Path, relative: str, *, at_most: int) -> bytes:
    """The bytes of a file inside `folder`.

    Args:
        folder: as for `open_inside`.
        relative: as for `open_inside`.
        at_most: bytes after which reading it is refused.

    Raises:
        Outside: as for `open_inside`.
        OSError: it cannot be read, or is larger.
    """
    with open_inside(folder, relative) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(f"'{relative}' is larger than {at_most >> 20} MiB")
    return data


def read_named(path: Path, *, at_most: int) -> bytes:
    """The bytes of a file that a user named, also through links; a pipe or device is refused rather than waited for.

    Raises:
        OSError: it is no regular file, cannot be read, or is larger than `at_most` bytes.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(f"it is larger than {at_most >> 20} MiB")
    return data


def tail_inside(folder: Path, relative: str, *, at_most: int) -> tuple[str, int]:
    """The end of a text file inside `folder`, from a line's start, and the size of the whole, bytes.

    Raises:
        Outside: as for `open_inside`.
        OSError: it cannot be read.
    """
    with open_inside(folder, relative) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - at_most))
        data = file.read(at_most)
    if size > at_most:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", "replace"), size


def _is_link(name: str, at: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode)
    except OSError:
        return False


def path_of(given: str | os.PathLike[str]) -> Path:
    """A path that somebody gave.

    Raises:
        UsageError: no file system could have it: a NUL in it, a name or the whole too long.
    """
    try:
        data = os.fsencode(given)
    except UnicodeEncodeError:
        raise UsageError(f"the path {str(given)[:80]!r} is not text that a file system can hold") from None
    if b"\0" in data:
        raise UsageError(f"the path {str(given)[:80]!r} holds a NUL character, which no file's name can")
    longest = max(map(len, data.split(b"/")))
    if longest > LONGEST_NAME or len(data) >= LONGEST_PATH:
        what = f"a name of {longest} bytes" if longest > LONGEST_NAME else f"{len(data)} bytes"
        raise UsageError(
            f"the path '{str(given)[:80]}...' is too long: it has {what}; names have at most {LONGEST_NAME} bytes, "
            f"paths {LONGEST_PATH - 1}"
        )
    return Path(given)


def absolute(given: str | os.PathLike[str]) -> str:
    """A path that somebody gave, as it is found from any working folder.

    Raises:
        UsageError: no file system could have it.
    """
    return str(path_of(given).absolute())


# -- YAML ----------------------------------------------------------------------------------------------------


def parse_yaml(data: bytes | str, *, nodes: int = MOST_NODES) -> Any:
    """What a YAML document holds: dict with texts as keys, list, str, int, float, bool, None.

    It is built from the parser's events, without recursion, so that no nesting reaches the stack. Dates stay texts; any
    other tag is refused.

    Args:
        data: UTF-8 or text.
        nodes: as `MOST_NODES`.

    Raises:
        Refused: it is no YAML, holds other tags, or is larger, deeper or wider than the limits.
    """
    import yaml

    if len(data) > LARGEST_DOCUMENT:
        raise TooMuch(f"it is larger than {LARGEST_DOCUMENT >> 20} MiB")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Refused(f"it is not UTF-8 at {error.start}") from error
    except yaml.YAMLError as error:  # a character that YAML does not know
        raise Refused(" ".join(str(error).split())) from error
    try:
        return _Building(loader, nodes).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        said = " ".join(filter(None, (getattr(error, "context", ""), getattr(error, "problem", ""))))
        raise Refused(f"{place}{said or ' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def measure_yaml(text: str, *, nodes: int = MOST_NODES) -> None:
    """Whether a document is within the limits, before another loader has it; what else is wrong with it, that one says.

    Args:
        text: the document.
        nodes: as `MOST_NODES`.

    Raises:
        TooMuch: it is larger, deeper or wider than the limits.
    """
    try:
        parse_yaml(text, nodes=nodes)
    except TooMuch:
        raise
    except Refused:
        return


_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def with_power(value: Any) -> Any:
    """`1e-4` as the number that it is, which YAML 1.1 takes for a text; anything else as it is."""
    return float(value) if isinstance(value, str) and _POWER.fullmatch(value) else value


_CORE = "tag:yaml.org,2002:"
_EMPTY = object()


class _Building:
    """A document in the making. An open list or mapping stands on `stack` with its anchor, its key that waits for a
    value, and the count of nodes at its start."""

    def __init__(self, loader: Any, nodes: int) -> None:
        self.loader = loader
        self.most = nodes
        self.nodes = 0
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.stack: list[list[Any]] = []
        self.root: Any = _EMPTY

    def document(self) -> Any:
        import yaml

        while True:
            event = self.loader.get_event()
            kind = type(event)
            if kind is yaml.ScalarEvent:
                self.count(1)
                self.put(self.scalar(event), event.anchor, 1)
            elif kind is yaml.SequenceStartEvent or kind is yaml.MappingStartEvent:
                self.count(1)
                wanted = "seq" if kind is yaml.SequenceStartEvent else "map"
                if event.tag not in (None, "!", _CORE + wanted):
                    raise Refused(f"line {event.start_mark.line + 1}: the tag {event.tag[:60]} is not known here")
                if len(self.stack) >= DEEPEST:
                    raise TooMuch(f"line {event.start_mark.line + 1}: nested more than {DEEPEST} deep")
                self.stack.append([[] if wanted == "seq" else {}, event.anchor, _EMPTY, self.nodes])
            elif kind is yaml.SequenceEndEvent or kind is yaml.MappingEndEvent:
                made, anchor, _, begun = self.stack.pop()
                self.put(made, anchor, self.nodes - begun + 1)
            elif kind is yaml.AliasEvent:
                if event.anchor not in self.anchors:
                    raise Refused(
                        f"line {event.start_mark.line + 1}: the alias *{event.anchor[:60]} stands for nothing whole"
                    )
                made, size = self.anchors[event.anchor]
                self.count(size)
                self.put(made, None, size)
            elif kind is yaml.DocumentStartEvent and self.root is not _EMPTY:
                raise Refused("it holds several documents")
            elif kind is yaml.StreamEndEvent:
                return None if self.root is _EMPTY else self.root

    def count(self, more: int) -> None:
        self.nodes += more
        if self.nodes > self.most:
            raise TooMuch(f"it holds more than {self.most:,} values")

    def put(self, made: Any, anchor: str | None, size: int) -> None:
        if anchor:
            self.anchors[anchor] = made, size
        if not self.stack:
            self.root = made
            return
        holder = self.stack[-1]
        if isinstance(holder[0], list):
            holder[0].append(made)
        elif holder[2] is not _EMPTY:
            holder[0][holder[2]], holder[2] = made, _EMPTY
        elif isinstance(made, list | dict):
            raise Refused("a key of a mapping is a list or a mapping")
        else:
            holder[2] = made if isinstance(made, str) else _key(made)

    def scalar(self, event: Any) -> Any:
        import yaml

        text, tag = event.value, event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, text, event.implicit)
        kind = tag.removeprefix(_CORE)
        if kind in ("str", "timestamp", "merge", "value"):
            return text
        if kind not in ("null", "bool", "int", "float"):
            raise Refused(f"line {event.start_mark.line + 1}: the tag {tag[:60]} is not known here")
        if len(text) > LONGEST_NUMBER:
            raise TooMuch(f"line {event.start_mark.line + 1}: a number of {len(text)} characters")
        try:
            return self.loader.yaml_constructors[tag](self.loader, yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError, OverflowError):
            raise Refused(f"line {event.start_mark.line + 1}: {text!r} is no {kind}") from None


def _key(value: Any) -> str:
    """A key that YAML takes for something else than a text, as it is written."""
    return {None: "null", True: "true", False: "false"}.get(value) or str(value)


# -- JSON ----------------------------------------------------------------------------------------------------

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes) -> Any:
    """What a JSON text holds; halves of surrogate pairs are replaced.

    Args:
        data: UTF-8; its caller limits how long it is.

    Raises:
        Refused: it is no JSON, too deep, or has a number with too many digits.
    """
    # Few brackets cannot be deep; of many, each pass takes the innermost away.
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        rest = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
        for _ in range(DEEPEST):
            rest = rest.replace(b"[]", b"").replace(b"{}", b"")
        if rest:
            raise TooMuch(f"nested more than {DEEPEST} deep")
    try:
        found = json.loads(data, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Refused(str(error)) from None
    return _whole_text(found) if b"\\ud" in data or b"\\uD" in data else found


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _whole_text(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_text(each) for each in value]
    if isinstance(value, dict):
        return {_whole_text(key): _whole_text(each) for key, each in value.items()}
    return value
