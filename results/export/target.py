"""What a target of an export is, and what an export is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .setup import Setup

Form = Literal["yaml", "json", "shell", "python", "env"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A framework, or a plain form, that a configuration can be written for."""

    name: str
    """What `--to` calls it."""
    about: str
    """What is written, in a few words."""
    use: str
    """The command that uses it; `{file}` stands for the file's name."""
    forms: Mapping[str, Callable[[Setup, str], str]]
    """For each form `body(setup, comment)`: the text. `comment` says what there is to say, as lines without
    comment signs; a form that holds comments puts them in. The first form is the default."""
    silent: frozenset[str] = frozenset()
    """Forms that have no place for comments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A configuration in the words of a target."""

    target: str
    """Its name."""
    form: str
    """`yaml`, `json`, `shell`, `python` or `env`: also says the suffix of a file."""
    text: str
    """The file's text."""
    notes: tuple[str, ...]
    """What could not be carried over. It stands in the text too, but for a form without comments."""
    devices: int
    """Devices of one training."""
    comments_inside: bool
    """Whether the text states the notes."""


SUFFIXES: Mapping[str, str] = {
    "yaml": ".yaml",
    "json": ".json",
    "shell": ".sh",
    "python": ".py",
    "env": ".env",
}
"""What files of a form end in."""


def hashed(comment: str) -> str:
    """Lines of a comment behind `#`."""
    return "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
