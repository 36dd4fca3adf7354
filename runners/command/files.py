"""Configuration files that a command reads: parsed, filled with the values of knobs, and written for each trial.

Files are edited as data, not as text. Texts that contain `{expression}` become values; a text that is a single
expression becomes a number or boolean. A value can also be put at a path: `ds.json:zero_optimization.stage={zero}`.
"""

import configparser
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UsageError
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, read_named
from ...base.writing import as_data
from ...frameworks.launcher import PLACED
from ...knobs.text import value_text
from ...space.expression import Expression
from .template import Template, is_expression

_ENDINGS = (".in", ".tmpl")


@dataclass(frozen=True)
class TrialFile:
    """A file that is written for every trial."""

    name: str
    """Name in the trial's folder."""
    document: Any
    """The parsed contents, with templates instead of texts that contain expressions."""

    @property
    def names(self) -> frozenset[str]:
        """The knobs and names of `GIVEN` that it uses."""
        return frozenset(name for each in _templates(self.document) for name in each.names)

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
    found: dict[Path, Any] = {}
    for each in requested:
        match = PLACED.fullmatch(each)
        if match is None:
            raise UsageError(
                f"render must be FILE or FILE:PATH=VALUE with a YAML, JSON, TOML or INI file, such as "
                f"ds.json:zero_optimization.stage={{zero}}, but got '{each}'"
            )
        path = Path(match["file"])
        if path not in found:
            document = _parsed(path)
            if Path(_written_name(path)).suffix in (".yaml", ".yml"):
                document = _unquoted(document, knobs)
            found[path] = _with_templates(document, knobs, str(path))
        if match["path"] is not None:
            where = f"{path}: {match['path']}"
            _put(found[path], match["path"], Template.read(match["value"], knobs, where), where)
    names = [_written_name(path) for path in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two files to render would both be written as {repeated}; give them different names")
    return tuple(TrialFile(_written_name(path), document) for path, document in found.items())


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
    except (Malformed, ValueError, configparser.Error) as error:
        raise UsageError(f"the file to render, {path}, is not valid {suffix[1:].upper()}: {error}") from error


def _unquoted(value: Any, knobs: Mapping[str, Expression]) -> Any:
    """Converts a mapping that YAML reads from `batch: {micro_batch}` back to the intended text."""
    if isinstance(value, list):
        return [_unquoted(each, knobs) for each in value]
    if not isinstance(value, dict):
        return value
    if list(value.values()) == [None]:
        (key,) = value
        if is_expression(key, knobs):
            return f"{{{key}}}"
    return {key: _unquoted(each, knobs) for key, each in value.items()}


def _with_templates(value: Any, knobs: Mapping[str, Expression], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_templates(each, knobs, f"{where}: {key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_with_templates(each, knobs, f"{where}[{at}]") for at, each in enumerate(value)]
    return Template.read(value, knobs, where) if isinstance(value, str) and "{" in value else value


def _put(document: Any, path: str, value: Template, where: str) -> None:
    """Puts a value at a path of keys and list positions. Missing keys are added."""
    *parents, last = [each.replace("\0", ".") for each in path.strip().replace("\\.", "\0").split(".")]
    at = document
    for key in parents:
        at = at[_position(at, key, where)] if isinstance(at, list) else _mapping(at, where).setdefault(key, {})
    if isinstance(at, list):
        at[_position(at, last, where)] = value
    else:
        _mapping(at, where)[last] = value


def _mapping(at: Any, where: str) -> dict[str, Any]:
    if not isinstance(at, dict):
        raise UsageError(f"{where} leads into a {type(at).__name__}, which has no keys")
    return at


def _position(at: list[Any], key: str, where: str) -> int:
    if not key.isdecimal() or int(key) >= len(at):
        raise UsageError(f"{where} leads into a list of {len(at)}, where '{key}' is not a position")
    return int(key)


def _templates(value: Any) -> list[Template]:
    if isinstance(value, Template):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for each in inside for found in _templates(each)]


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Template):
        return as_data(value.value(values))
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    return [_filled(each, values) for each in value] if isinstance(value, list) else value


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


def _ini() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case, as its documentation has it
    return parser


def _read_ini(data: bytes) -> Any:
    parser = _ini()
    parser.read_string(data.decode())
    return {name: dict(section) for name, section in parser.items() if section or name != parser.default_section}


def _write_ini(document: Any) -> str:
    import io

    parser = _ini()
    parser.read_dict({name: {key: value_text(each) for key, each in keys.items()} for name, keys in document.items()})
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


_FORMATS: Mapping[str, tuple[Callable[[bytes], Any], Callable[[Any], str]]] = {
    ".yaml": (parse_yaml, _write_yaml),
    ".yml": (parse_yaml, _write_yaml),
    ".json": (json.loads, _write_json),
    ".toml": (_read_toml, _write_toml),
    ".ini": (_read_ini, _write_ini),
    ".cfg": (_read_ini, _write_ini),
}
