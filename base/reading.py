"""Reading untrusted files: regular files only, only inside their folder, with size limits checked before parsing.

Reading any file ends within two seconds and 200 MiB of memory, with its data or with an error that states the reason.
docs/security.md lists which inputs are trusted.
"""

import contextlib
import errno
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
"""Largest YAML document, bytes."""
MOST_NODES = 100_000
"""Most scalars, lists and mappings of a YAML document. Nodes behind an alias count each time they are repeated."""
DEEPEST = 100
"""Deepest nesting of lists and mappings."""
LONGEST_NUMBER = 400
"""Most characters of a number; the longest float without an exponent has 325 digits."""


class Malformed(ValueError):
    """The document is damaged, or `TooMuch`. The message states where."""


class TooMuch(Malformed):
    """The document is larger or deeper than any that redline writes."""


class Outside(OSError):
    """A path leaves its folder, passes a link, or is not a regular file."""


@contextlib.contextmanager
def open_inside(folder: Path, relative: str) -> Iterator[BinaryIO]:
    """Opens the file `relative` of `folder` for unbuffered reading.

    Each path component is opened relative to its parent, and links are refused (openat(2), O_NOFOLLOW), so that
    nothing can change between check and use. A pipe or device raises an error instead of blocking.

    Args:
        folder: the folder the path must stay in; may itself be reached through links.
        relative: path relative to it, with `/`.

    Raises:
        Outside: the path is absolute, contains `..`, passes a link, or is not a regular file.
        OSError: the file does not exist or cannot be read.
    """
    components = PurePosixPath(relative).parts
    try:
        plain = b"\0" not in os.fsencode(relative)
    except UnicodeEncodeError:
        plain = False
    if not components or not plain or relative.startswith("/") or ".." in components:
        raise Outside(f"'{relative}' is not inside the folder")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, component in enumerate(components, start=1):
            try:
                below = os.open(component, flags | (os.O_DIRECTORY if number < len(components) else 0), dir_fd=fd)
            except OSError as error:
                if _is_link(component, fd):
                    raise Outside(f"'{relative}' is a symbolic link or lies behind one") from error
                raise
            os.close(fd)
            fd = below
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Outside(f"'{relative}' is not a regular file")
        file = os.fdopen(fd, "rb")
        fd = -1
    finally:
        if fd >= 0:
            os.close(fd)
    with file:
        yield file


def read_inside(folder: Path, relative: str, *, at_most: int) -> bytes:
    """Returns the bytes of a file inside `folder`.

    Args:
        folder: as for `open_inside`.
        relative: as for `open_inside`.
        at_most: largest size that is read, bytes.

    Raises:
        Outside: as for `open_inside`.
        OSError: the file cannot be read, or is larger.
    """
    with open_inside(folder, relative) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(f"'{relative}' is larger than {at_most >> 20} MiB")
    return data


def read_named(path: Path, *, at_most: int) -> bytes:
    """Returns the bytes of a file named by the user. Links are followed; a pipe or device raises an error instead of
    blocking.

    Raises:
        OSError: the file is not regular, cannot be read, or is larger than `at_most` bytes.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(f"it is larger than {at_most >> 20} MiB")
    return data


def tail_inside(folder: Path, relative: str, *, at_most: int) -> tuple[str, int]:
    """Returns the end of a text file inside `folder`, from the start of a line, and the size of the whole file,
    bytes.

    Raises:
        Outside: as for `open_inside`.
        OSError: the file cannot be read.
    """
    with open_inside(folder, relative) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - at_most))
        data = file.read(at_most)
    if size > at_most:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", "replace"), size


def _is_link(name: str, folder_fd: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=folder_fd).st_mode)
    except OSError:
        return False


def path_of(path: str | os.PathLike[str]) -> Path:
    """Returns a user's path as a `Path`.

    Raises:
        UsageError: the path is invalid on its file system: it contains a NUL, or a name or the whole path is too long.
    """
    try:
        os.lstat(path)
    except ValueError as error:
        raise UsageError(f"the path {str(path)[:80]!r} cannot be that of a file: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"the path '{str(path)[:80]}...' is too long") from None
    return Path(path)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a user's path as an absolute path.

    Raises:
        UsageError: as for `path_of`.
    """
    return str(path_of(path).absolute())


# -- YAML ----------------------------------------------------------------------------------------------------


def parse_yaml(data: bytes | str, *, nodes: int = MOST_NODES, ours: bool = False) -> Any:
    """Returns the content of a YAML document: dict with text keys, list, str, int, float, bool, None.

    The limits are checked before the document is loaded. Dates and merge keys stay strings; other tags raise an error.

    Args:
        data: UTF-8 bytes or text.
        nodes: most nodes, see `MOST_NODES`.
        ours: the document is one of redline's own formats: unquoted `1e-4` is a number, and a key that is given twice is refused.
            Other programs read such a number as text, and take the last value of a key.

    Raises:
        TooMuch: the document is larger, deeper or wider than the limits.
        Malformed: the document is not YAML, or has other tags.
    """
    import yaml

    if len(data) > LARGEST_DOCUMENT:
        raise TooMuch(f"it is larger than {LARGEST_DOCUMENT >> 20} MiB")
    try:
        content = data.decode("utf-8") if isinstance(data, bytes) else data
        _measure(content, nodes)
        return yaml.load(content, Loader=_loader(ours))
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Malformed(f"it is not UTF-8 at {error.start}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = " ".join(filter(None, (getattr(error, "context", ""), getattr(error, "problem", ""))))
        raise Malformed(f"{place}{problem or ' '.join(str(error).split())}") from error


POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+\Z")
"""Numbers that YAML 1.1, which PyYAML reads, takes for text; in YAML 1.2 they are numbers."""


def with_power(value: Any) -> Any:
    """Returns numbers such as `1e-4`, which YAML 1.1 reads as text, as floats; any other value unchanged."""
    return float(value) if isinstance(value, str) and POWER.match(value) else value


def _measure(text: str, nodes: int) -> None:
    """Raises `TooMuch` for a document that is too deep or too wide.

    Reads the parser's events, which needs neither recursion nor memory for the document.
    """
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
def _loader(ours: bool) -> Any:
    """Returns PyYAML's safe loader, limited to the types that JSON has and to text keys."""
    import yaml

    core = "tag:yaml.org,2002:"
    kinds = [core + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")]
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        yaml_constructors: ClassVar = {tag: base.yaml_constructors[tag] for tag in kinds} | {
            None: base.yaml_constructors[None]
        }
        yaml_implicit_resolvers: ClassVar = {
            character: [(tag, pattern) for tag, pattern in resolvers if tag in kinds]
            for character, resolvers in base.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            mapping = {}
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, list | dict):
                    raise Malformed(f"line {key_node.start_mark.line + 1}: a key of a mapping is a list or a mapping")
                name = key if isinstance(key, str) else _key(key)
                if ours and name in mapping:
                    raise Malformed(f"line {key_node.start_mark.line + 1}: key '{name}' is given twice")
                mapping[name] = self.construct_object(value_node, deep=deep)
            return mapping

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
    if ours:
        Loader.add_implicit_resolver(core + "float", POWER, list("-+0123456789"))
    return Loader


def _key(value: Any) -> str:
    """Returns a key that YAML reads as another type than text, as YAML writes it."""
    return {None: "null", True: "true", False: "false"}.get(value) or str(value)


# -- JSON ----------------------------------------------------------------------------------------------------

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes) -> Any:
    """Returns the content of a JSON document. Lone surrogates are replaced.

    Args:
        data: UTF-8 bytes. The caller limits the size.

    Raises:
        Malformed: the data is not JSON, is nested too deep, or contains a number with too many digits.
    """
    # Few brackets cannot be too deep. With many, each pass removes the innermost pairs.
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
        for _ in range(DEEPEST):
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if brackets:
            raise TooMuch(f"nested more than {DEEPEST} deep")
    try:
        content = json.loads(data, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None
    return _whole_text(content) if b"\\ud" in data or b"\\uD" in data else content


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _whole_text(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_text(element) for element in value]
    if isinstance(value, dict):
        return {_whole_text(key): _whole_text(element) for key, element in value.items()}
    return value


class JsonLines:
    """Reads the JSON objects that another process appends to a file, a line each.

    Args:
        folder: of the file.
        name: of the file, which need not exist yet.
        begin: offset to start at, bytes.
    """

    def __init__(self, folder: Path, name: str, begin: int = 0) -> None:
        self._folder, self._name, self._at, self._rest = folder, name, begin, b""
        self.damaged = 0
        """Number of lines that were left out."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields new complete lines. Lines that are not JSON objects, such as one that a full disk truncated, are
        left out.

        Raises:
            OSError: the file exists but cannot be read.
        """
        try:
            with open_inside(self._folder, self._name) as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        self._at += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        for line in complete:
            try:
                record = parse_json(line)
            except Malformed:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.damaged += 1
