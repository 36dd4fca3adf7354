"""Reading what strangers wrote: regular files only, inside their folder only, measured before they are parsed.

Whatever a file holds, reading it ends within two seconds and 200 MiB of memory, with its data or with a refusal in
words. docs/security.md says what is trusted and what is not.
"""

import contextlib
import functools
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

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


class Malformed(ValueError):
    """What was read is damaged, or `TooMuch`; says in what."""


class TooMuch(Malformed):
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
    """Returns the content of a YAML document: dict with text keys, list, str, int, float, bool, None.

    The document is measured before it is loaded. Dates and merge keys stay texts; other tags are refused.

    Args:
        data: UTF-8 or text.
        nodes: as `MOST_NODES`.

    Raises:
        TooMuch: it is larger, deeper or wider than the limits.
        Malformed: it is not YAML, or has other tags.
    """
    import yaml

    if len(data) > LARGEST_DOCUMENT:
        raise TooMuch(f"it is larger than {LARGEST_DOCUMENT >> 20} MiB")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        _measure(text, nodes)
        return yaml.load(text, Loader=_loader())
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Malformed(f"it is not UTF-8 at {error.start}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = " ".join(filter(None, (getattr(error, "context", ""), getattr(error, "problem", ""))))
        raise Malformed(f"{place}{problem or ' '.join(str(error).split())}") from error


def measure_yaml(text: str, *, nodes: int = MOST_NODES) -> None:
    """Checks a document's size before another loader reads it, which reports any other fault.

    Raises:
        TooMuch: it is larger, deeper or wider than the limits.
    """
    import yaml

    if len(text) > LARGEST_DOCUMENT:
        raise TooMuch(f"it is larger than {LARGEST_DOCUMENT >> 20} MiB")
    try:
        _measure(text, nodes)
    except TooMuch:
        raise
    except (Malformed, yaml.YAMLError, UnicodeEncodeError):
        return


_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def with_power(value: Any) -> Any:
    """`1e-4` as the number that it is, which YAML 1.1 takes for a text; anything else as it is."""
    return float(value) if isinstance(value, str) and _POWER.fullmatch(value) else value


def _measure(text: str, nodes: int) -> None:
    """Refuses what is too deep or too wide, by the parser's events, which need neither recursion nor memory."""
    import yaml

    count = 0
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise Malformed(
                    f"line {event.start_mark.line + 1}: the alias *{event.anchor[:60]} has no complete anchor"
                )
            count += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                if len(opened) >= DEEPEST:
                    raise TooMuch(f"line {event.start_mark.line + 1}: nested more than {DEEPEST} deep")
                opened.append((event.anchor, count))
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = opened.pop()
            if anchor:
                sizes[anchor] = count - start + 1
        if count > nodes:
            raise TooMuch(f"it has more than {nodes:,} values")


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader, for the types that JSON has too, and with text keys."""
    import yaml

    core = "tag:yaml.org,2002:"
    kinds = [core + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")]
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        yaml_constructors: ClassVar = {tag: base.yaml_constructors[tag] for tag in kinds} | {
            None: base.yaml_constructors[None]
        }
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in found if tag in kinds]
            for first, found in base.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            made = {}
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, list | dict):
                    raise Malformed(f"line {key_node.start_mark.line + 1}: a key of a mapping is a list or a mapping")
                made[key if isinstance(key, str) else _key(key)] = self.construct_object(value_node, deep=deep)
            return made

    def number(kind: str) -> None:
        construct = base.yaml_constructors[core + kind]

        def checked(loader: Any, node: Any) -> Any:
            if len(node.value) > LONGEST_NUMBER:
                raise TooMuch(f"line {node.start_mark.line + 1}: a number of {len(node.value)} characters")
            try:
                return construct(loader, node)
            except (ValueError, KeyError, IndexError, OverflowError):
                raise Malformed(f"line {node.start_mark.line + 1}: {node.value!r} is not a valid {kind}") from None

        Loader.yaml_constructors[core + kind] = checked

    for kind in ("int", "float", "bool"):
        number(kind)
    return Loader


def _key(value: Any) -> str:
    """A key that YAML takes for something else than a text, as YAML writes it."""
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
        Malformed: it is no JSON, too deep, or has a number with too many digits.
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
        raise Malformed(str(error)) from None
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
