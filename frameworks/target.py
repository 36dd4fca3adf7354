"""What a target of an export is, and what an export is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..results.measurement import Trial
from .setup import Setup

Form = Literal["yaml", "json", "shell", "python", "env"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A framework, or a plain form, that a configuration can be written for."""

    name: str
    """What `--to` calls it."""
    about: str
    """What is written, in a few words."""
    stem: str
    """What its file is called where nobody says, without the suffix."""
    forms: Mapping[str, Callable[[Setup, str], str]]
    """For each form `body(setup, comment)`: the text. `comment` says what there is to say, as lines without
    comment signs; a form that holds comments puts them in. The first form is the default."""
    silent: frozenset[str] = frozenset()
    """Forms that have no place for comments."""
    checked: tuple[str, str] | None = None
    """The framework's package and the version of it that exports were checked against."""
    pipelines: bool = True
    """Whether what is written has pipeline stages."""
    sequences: tuple[str, ...] = ()
    """By which of `sp` and `cp` what is written cuts sequences over ranks."""
    use: Callable[[str], str] | None = None
    """How a file of that name is read, where that is not in `start`."""
    start: Callable[[Setup, str], str] | None = None
    """The shell line that starts a training with a file of that name (quoted for a shell) on one host, or is
    run on each of several: MASTER_ADDR is then the first one's name, NODE_RANK each one's own number from 0.
    Further arguments can be put behind it. None where there is nothing to start."""

    def setup(self, trial: Trial, document: Mapping[str, Any] | None) -> Setup:
        """What an export to it starts from."""
        return Setup(trial, document, self.name, pipelines=self.pipelines, sequences=self.sequences)

    def file(self, form: str) -> str:
        """What a file of that form is called where nobody says."""
        return self.stem + SUFFIXES[form]


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
    """What has to be known, and what could not be carried over. It stands in the text too, but for a form
    without comments."""
    use: tuple[str, ...]
    """How the file is used, in lines; in the text too, likewise."""
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


def sourced(file: str) -> str:
    """A file's name (quoted for a shell) as `source` finds it: without a slash it would look through PATH."""
    return file if "/" in file else f"./{file}"
