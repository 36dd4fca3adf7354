"""Renders configuration files that a command reads: parses them, and writes them with the values of knobs for each trial.

Files are edited as data, not as text. Texts that contain `{expression}` become values; a text that is a single
expression becomes a number or boolean. A value can also be put at a path: `ds.json:zero_optimization.stage={zero}`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, read_named
from ...base.writing import as_data
from ...frameworks.launcher import PLACED
from ...space.expression import Expression
from .template import Template, is_expression

_ENDINGS = (".in", ".tmpl")
"""Endings of templates, which the written files do not have."""


@dataclass(frozen=True)
class TrialFile:
    """A file that is written for every trial."""

    name: str
    """Name in the trial's folder."""
    document: Any
    """The parsed contents, with templates instead of texts that contain expressions."""

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `PLACEHOLDERS` that it uses."""
        return frozenset(name for template in _templates(self.document) for name in template.names)

    @property
    def divisions(self) -> tuple[Expression, ...]:
        """Its expressions that may have no value."""
        return tuple(expression for template in _templates(self.document) for expression in template.divisions)

    def write(self, folder: Path, values: Mapping[str, Any]) -> Path:
        """Writes the file for a trial and returns its path."""
        path = folder / self.name
        path.write_text(_FORMATS[path.suffix][1](_filled(self.document, values)), encoding="utf-8")
        return path


def read_files(requested: Sequence[str], knobs: Mapping[str, Expression]) -> tuple[TrialFile, ...]:
    """Reads the files to render.

    Args:
        requested: `FILE` or `FILE:PATH=VALUE`, such as `train.yaml.in` or `ds.json:zero_optimization.stage={zero}`;
            several of the same file are combined.
        knobs: available in expressions.

    Raises:
        UsageError: a file does not exist, has an unknown format or cannot be parsed, a path does not exist in it, or
            an expression is invalid.
    """
    documents: dict[Path, Any] = {}
    for option in requested:
        match = PLACED.fullmatch(option)
        if match is None:
            raise UsageError(
                f"render must be FILE or FILE:PATH=VALUE with a YAML, JSON or TOML file, such as "
                f"ds.json:zero_optimization.stage={{zero}}, but got '{option}'"
            )
        path = Path(match["file"])
        if path not in documents:
            document = _parsed(path)
            # Without quotation marks YAML reads a template as a mapping.
            if Path(_written_name(path)).suffix in (".yaml", ".yml"):
                document = _unquoted(document, knobs)
            documents[path] = _with_templates(document, knobs, str(path))
        if match["path"] is not None:
            subject = f"{path}: {match['path']}"
            _put(documents[path], match["path"], Template.read(match["value"], knobs, subject), subject)
    names = [_written_name(path) for path in documents]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two files to render would both be written as {repeated}; give them different names")
    return tuple(TrialFile(_written_name(path), document) for path, document in documents.items())


def _written_name(path: Path) -> str:
    name = path.name
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _parsed(path: Path) -> Any:
    suffix = Path(_written_name(path)).suffix
    try:
        return _FORMATS[suffix][0](read_named(path, at_most=LARGEST_DOCUMENT))
    except OSError as error:
        raise UsageError(f"the file to render, {path}, cannot be read: {error.strerror or error}") from error
    except (Malformed, ValueError) as error:
        raise UsageError(f"the file to render, {path}, is not valid {suffix[1:].upper()}: {error}") from error


def _unquoted(value: Any, knobs: Mapping[str, Expression]) -> Any:
    """Converts the mapping {"micro_batch": None}, as which YAML reads `batch: {micro_batch}`, back to a template's text."""
    if isinstance(value, list):
        return [_unquoted(item, knobs) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value.values()) == [None]:
        (key,) = value
        if is_expression(key, knobs):
            return f"{{{key}}}"
    return {key: _unquoted(item, knobs) for key, item in value.items()}


def _with_templates(value: Any, knobs: Mapping[str, Expression], subject: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_templates(item, knobs, f"{subject}: {key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_with_templates(item, knobs, f"{subject}[{index}]") for index, item in enumerate(value)]
    return Template.read(value, knobs, subject) if isinstance(value, str) and "{" in value else value


def _put(document: Any, path: str, value: Template, subject: str) -> None:
    """Puts a value at a path of keys and list positions. Missing keys are added. A backslash escapes a dot in a key."""
    *parents, last_key = [key.replace("\0", ".") for key in path.strip().replace("\\.", "\0").split(".")]
    parent = document
    for key in parents:
        if isinstance(parent, list):
            parent = parent[_position(parent, key, subject)]
        else:
            parent = _mapping(parent, subject).setdefault(key, {})
    if isinstance(parent, list):
        parent[_position(parent, last_key, subject)] = value
    else:
        _mapping(parent, subject)[last_key] = value


def _mapping(parent: Any, subject: str) -> dict[str, Any]:
    if not isinstance(parent, dict):
        raise UsageError(f"{subject} leads into a {type(parent).__name__}, which has no keys")
    return parent


def _position(parent: list[Any], key: str, subject: str) -> int:
    if not key.isdecimal() or int(key) >= len(parent):
        raise UsageError(f"{subject} leads into a list of {len(parent)}, where '{key}' is not a position")
    return int(key)


def _templates(value: Any) -> list[Template]:
    if isinstance(value, Template):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [template for item in inside for template in _templates(item)]


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Template):
        return as_data(value.value(values))
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return [_filled(item, values) for item in value] if isinstance(value, list) else value


def _write_yaml(document: Any) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _write_json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _read_toml(data: bytes) -> Any:
    import tomllib

    return tomllib.loads(data.decode())


def _write_toml(document: Any) -> str:
    import tomli_w

    return tomli_w.dumps(document)


_FORMATS: Mapping[str, tuple[Callable[[bytes], Any], Callable[[Any], str]]] = {
    ".yaml": (parse_yaml, _write_yaml),
    ".yml": (parse_yaml, _write_yaml),
    ".json": (json.loads, _write_json),
    ".toml": (_read_toml, _write_toml),
}
