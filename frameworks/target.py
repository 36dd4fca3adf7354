"""Targets of exports, and their results."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..base.errors import UsageError
from ..results.measurement import Trial
from .export_input import SEQUENCES, ExportInput

Form = Literal["yaml", "json", "shell", "python", "env"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A framework, or a plain format, that a configuration can be exported to."""

    name: str
    """Name for `--to`."""
    about: str
    """Short description."""
    stem: str
    """Default name of its file, without the suffix."""
    forms: Mapping[str, Callable[[ExportInput, str], str]]
    """For each form `body(setup, comment)`, which returns the text. `comment` contains the notes as lines without
    comment signs; a form with comments inserts them. The first form is the default.
    """
    silent: frozenset[str] = frozenset()
    """Forms without comments."""
    checked: tuple[str, str] | None = None
    """Package of the framework, with the version that exports were checked against."""
    pipelines: bool = True
    """True if it supports pipeline stages."""
    sequences: tuple[str, ...] = ()
    """Those of `sp` and `cp` that it supports."""
    runs: bool = False
    """True if it can treat runs of blocks unlike each other (`strategy`)."""
    uneven: bool = False
    """True if it supports stages with given numbers of blocks (`stage_blocks`)."""
    trains: tuple[str, ...] = ("",)
    """Endings of the classes of transformers that it can train; by default those of all."""
    use: Callable[[str], str] | None = None
    """How a file of that name is used, if `start` does not show it."""
    start: Callable[[ExportInput, str], str] | None = None
    """Shell line that starts a training with a file of that name (quoted for a shell) on one host, or that runs on
    each of several hosts, with MASTER_ADDR the first host's name and NODE_RANK each host's number from 0. Further
    arguments can be appended. None if there is nothing to start.
    """

    def setup(self, trial: Trial, document: Mapping[str, Any] | None) -> ExportInput:
        """Input of an export to this target."""
        able = {name: getattr(self, name) for name in ("pipelines", "sequences", "runs", "uneven")}
        setup = ExportInput(trial, document, self.name, **able)
        if setup.model_class and not setup.model_class.endswith(self.trains):
            raise UsageError(
                f"{self.name} trains language models (*{', *'.join(self.trains)}), but this run measured "
                f"{setup.model_class}: its settings would start another training; --to accelerate and --to python keep the model"
            )
        return setup

    def runs_whole(self, config: Mapping[str, Any]) -> bool:
        """True if its file runs a configuration on all its devices."""
        lacking = [name for name in SEQUENCES if name not in self.sequences] + ([] if self.pipelines else ["pp"])
        return all(config.get(name, 1) == 1 for name in lacking) and (self.uneven or config.get("stage_blocks") is None)

    def file(self, form: str) -> str:
        """Default name of a file of that form."""
        return self.stem + SUFFIXES[form]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A configuration exported to a target."""

    target: str
    """Name of the target."""
    form: str
    """`yaml`, `json`, `shell`, `python` or `env`; it determines the suffix of a file."""
    text: str
    """The file's text."""
    notes: tuple[str, ...]
    """Warnings, and what could not be carried over. They are in the text too, except for a form without comments."""
    use: tuple[str, ...]
    """Instructions, in lines; in the text too, likewise."""
    devices: int
    """Devices of one training."""
    comments_inside: bool
    """True if the text contains the notes."""


SUFFIXES: Mapping[str, str] = {"yaml": ".yaml", "json": ".json", "shell": ".sh", "python": ".py", "env": ".env"}
"""File suffix of each form."""


def hashed(comment: str) -> str:
    """Lines of a comment, each after `#`."""
    return "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())


def as_yaml(content: Callable[[ExportInput], Any]) -> Callable[[ExportInput, str], str]:
    """Returns the form of a target whose file is this content in YAML."""

    def body(setup: ExportInput, comment: str) -> str:
        import yaml

        return hashed(comment) + yaml.safe_dump(content(setup), sort_keys=False, allow_unicode=True)

    return body


def as_json(content: Callable[[ExportInput], Any]) -> Callable[[ExportInput, str], str]:
    """Returns the form of a target whose file is this content in JSON, without the comment."""
    return lambda setup, comment: json.dumps(content(setup), indent=2) + "\n"


def sourced(file: str) -> str:
    """A file's name (quoted for a shell) for `source`, which searches PATH for a name without a slash."""
    return file if "/" in file else f"./{file}"
