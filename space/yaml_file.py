"""Spaces as YAML files. Errors name the file, the line and the column."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SpaceError
from ..reading import LARGEST_DOCUMENT, TooMuch, measure_yaml, path_of, read_named
from .document import Declared, KeyPath, Places, read_dict
from .grammar import GrammarError

_MOST_NODES = 20_000
"""Of a file that PyYAML itself reads, since only that says where each entry stands."""


def write_yaml(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """See `Space.to_yaml`; what is written is what `Space.to_dict` says."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists of values on one line, everything else on lines of its own."""

    Dumper.add_representer(
        _Inline,
        lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
    )
    for entry in data["knobs"]:
        entry.update({key: _Inline(entry[key]) for key in ("values", "others") if key in entry})
    text = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    target = Path(path)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise SpaceError(f"cannot write the space to {target}: {error.strerror or error}") from error


class _Inline(list):
    """A list that is written on one line."""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_yaml(space: Declared, path: str | os.PathLike[str]) -> Declared:
    """See `Space.from_yaml`."""
    import yaml

    try:
        text = read_named(path_of(path), at_most=LARGEST_DOCUMENT).decode("utf-8")
    except OSError as error:
        raise SpaceError(f"cannot read the space from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpaceError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}") from error
    loader = None
    try:
        measure_yaml(text, nodes=_MOST_NODES)
    except TooMuch as error:
        raise SpaceError(f"{path}: {error}") from error
    try:
        loader = yaml.SafeLoader(text)  # what yaml.safe_load uses; it also tells where a node stands
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = " ".join(
            filter(None, (getattr(error, "context", ""), getattr(error, "problem", "")))
        ) or str(error)
        raise SpaceError(f"{path}{place}: not valid YAML: {problem}") from error
    except (ValueError, RecursionError) as error:  # an impossible date, lists nested without end
        raise SpaceError(f"{path}: not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        raise SpaceError(f"{path} is empty; a space has at least the key 'knobs'")
    places = _YamlPlaces(str(path), text, node)
    places.refuse_duplicates()
    return read_dict(space, data, places)


class _YamlPlaces(Places):
    """Where an entry stands: file and line."""

    def __init__(self, path: str, text: str, root: Any) -> None:
        self.path = path
        self.text = text
        self.root = root

    def node(self, path: KeyPath) -> Any:
        node = self.root
        for key in path:
            if isinstance(key, int):
                node = node.value[key]
            else:
                node = next((value for name, value in node.value if name.value == key), node)
        return node

    def locate(self, path: KeyPath, error: SpaceError | None = None) -> str:
        return f"{self.path}, line {self.node(path).start_mark.line + 1}: "

    def message(self, path: KeyPath, error: SpaceError) -> str:
        if isinstance(error, GrammarError):
            node = self.node(path)
            place = self._inside(node, error)
            if place is not None:
                line, column = place
                shown = error.text.strip()
                return f"{self.path}, line {line}, column {column}: {error.problem}, in `{shown}`"
        return f"{self.locate(path)}{error}"

    def _inside(self, node: Any, error: GrammarError) -> tuple[int, int] | None:
        """Where in the file an error in a scalar's text is; None where YAML folded or escaped the text."""
        start, raw = node.start_mark, self.text[node.start_mark.index : node.end_mark.index]
        if "\n" not in raw:
            quote = 1 if node.style in ("'", '"') else 0
            if raw[quote : len(raw) - quote] == error.text:
                return start.line + 1, start.column + 1 + quote + error.offset
        if node.style == "|":
            lines, inner = raw.split("\n")[1:], error.text.split("\n")
            if error.line <= min(len(lines), len(inner)):
                indent = len(lines[error.line - 1]) - len(inner[error.line - 1])
                return start.line + 1 + error.line, indent + error.column
        return None

    def refuse_duplicates(self) -> None:
        """YAML lets a later key silently replace an earlier one; a space does not."""
        for mapping in _mappings(self.root):
            seen = set()
            for key, _ in mapping.value:
                if key.value in seen:
                    raise SpaceError(
                        f"{self.path}, line {key.start_mark.line + 1}: key '{key.value}' is given twice"
                    )
                if isinstance(key.value, str):
                    seen.add(key.value)


def _mappings(root: Any) -> Iterator[Any]:
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))
        if node.id == "mapping":
            yield node
            todo += [value for _, value in node.value]
        else:
            todo += node.value
