"""Recognises search spaces of other tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.reading import path_of
from . import deepspeed_autotuning as deepspeed, flagscale, paddle
from .stated_space import Draft, ForeignSpace, Format, read_document

FORMATS: tuple[Format, ...] = tuple(each.FORMAT for each in (flagscale, paddle, deepspeed))


@dataclass(frozen=True, kw_only=True)
class SpaceFile:
    """A search space of another tool, recognised but not yet read."""

    format: Format
    """Format of the tool."""
    document: Any
    """Contents of the file, or the object."""
    path: Path | None = None
    """The file, if it is a document."""
    name: str = ""
    """Name for messages."""

    def read(self, devices: int, global_batch: int | None = None) -> ForeignSpace:
        """Returns the space for a number of devices.

        Args:
            devices: devices of one trial.
            global_batch: samples of a step; None for the file's value.

        Raises:
            UsageError: the file does not follow its format, or nothing in it can be tuned.
        """
        draft = Draft(devices=devices, global_batch=global_batch, path=self.path)
        try:
            self.format.read(self.document, draft)
        except UsageError as error:
            raise UsageError(f"{self.called}: {error}") from error
        return draft.finish(self.called)

    @property
    def called(self) -> str:
        """Description with its name."""
        return f"{self.name} ({self.format.name})" if self.name else self.format.name


def find_source(given: Any) -> SpaceFile:
    """Recognises the search space of another tool.

    Args:
        given: a file in YAML or JSON, or its content.

    Raises:
        UsageError: the file cannot be read, or its format is unknown.
    """
    path, name = None, ""
    document = given
    if isinstance(given, str | Path):
        name = str(given)
        path = path_of(given)
        document = read_document(path)
    for each in FORMATS:
        if each.recognises(document):
            return SpaceFile(format=each, document=document, path=path, name=name)
    if isinstance(document, Mapping) and "knobs" in document:
        raise UsageError(f"{name or 'this'} is a space of redline: give it with --space")
    known = "; ".join(f"{each.name} has {each.holds}" for each in FORMATS)
    raise UsageError(f"{name or repr(document)[:80]} is not a known format. {known}. Write other spaces for --space.")
