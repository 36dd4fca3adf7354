"""Documents of other tools: YAML and JSON, read within limits and never run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_json, parse_yaml, read_named


def read_document(path: Path) -> Any:
    """What a file holds: JSON where its name says so, else YAML.

    Raises:
        UsageError: it cannot be read, or is neither.
    """
    kind, parse = ("JSON", parse_json) if path.suffix == ".json" else ("YAML", parse_yaml)
    try:
        return parse(read_named(path, at_most=LARGEST_DOCUMENT))
    except OSError as error:
        raise UsageError(f"the space's file {path} cannot be read: {error.strerror or error}") from error
    except Malformed as error:
        raise UsageError(f"the space's file {path} is no {kind}: {error}") from error


def section(given: Any, shown: str) -> Mapping[str, Any]:
    """A part of a document that is a mapping; empty where it is not there.

    Raises:
        UsageError: it is something else.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{shown} must be a mapping, but is {given!r}")
    return given
