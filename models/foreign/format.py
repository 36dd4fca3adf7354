"""What is known of a format that another tool states its space in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .draft import Draft


@dataclass(frozen=True, kw_only=True)
class Format:
    """A tool's way to state what may vary."""

    name: str
    """What it is called."""
    holds: str
    """What it is known by, for people."""
    recognises: Callable[[Any], bool]
    """Whether a document, or an object of Python, is one."""
    read: Callable[[Any, Draft], None]
    """Puts what it says into a draft."""
    command: Callable[[Any], Mapping[str, Any]] | None = None
    """The fields of a `redline.Command` that it states, where such files state one."""
