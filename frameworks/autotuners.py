"""Where a space of another tool's stands, and which tool's it is."""

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
class Source:
    """A space of another tool's, recognised and not yet read."""

    format: Format
    """Whose it is."""
    document: Any
    """What the file holds, or the object."""
    path: Path | None = None
    """The file, where it is a document."""
    name: str = ""
    """What it is called in messages."""

    def read(self, devices: int, global_batch: int | None = None) -> ForeignSpace:
        """The space that it comes to on so many devices.

        Args:
            devices: of one trial.
            global_batch: samples of a step; None for what the file says.

        Raises:
            UsageError: it is not as its format has it, or nothing of it can be tuned.
        """
        draft = Draft(devices=devices, global_batch=global_batch, path=self.path)
        try:
            self.format.read(self.document, draft)
        except UsageError as error:
            raise UsageError(f"{self.called}: {error}") from error
        return draft.finish(self.called)

    @property
    def called(self) -> str:
        """What it is, with its name."""
        return f"{self.name} ({self.format.name})" if self.name else self.format.name


def find_source(given: Any) -> Source:
    """A space of another tool's.

    Args:
        given: a file in YAML or JSON, or its content.

    Raises:
        UsageError: the file cannot be read, or it is not a known format.
    """
    path, name = None, ""
    document = given
    if isinstance(given, str | Path):
        name = str(given)
        path = path_of(given)
        document = read_document(path)
    for each in FORMATS:
        if each.recognises(document):
            return Source(format=each, document=document, path=path, name=name)
    if isinstance(document, Mapping) and "knobs" in document:
        raise UsageError(f"{name or 'this'} is a space of redline's own: give it with --space")
    known = "; ".join(f"{each.name} has {each.holds}" for each in FORMATS)
    raise UsageError(f"{name or repr(document)[:80]} is not a known format. {known}. Write other spaces for --space.")
