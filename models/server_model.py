"""Models that a server accepts: a preset's name, a hub id, or the contents of a config.json."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import WorkloadError, unknown
from .presets import PRESETS

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
LONGEST_NAME = 200  # a hub id has at most 96 characters
_LOADED_BY_NAME = ("backbone", "backbone_kwargs", "use_pretrained_backbone", "use_timm_backbone")
"""Keys of a config.json that make transformers load another model, from anywhere."""
_LOADERS = ("timm_backbone", "timm_wrapper")
"""Model types whose models another library finds by a name, which may be a folder's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerModel:
    """A model named in another user's request.

    It is resolved without looking at files of this machine: the name is looked up among the presets, or requested from
    the hub's client (including its cache), and never opened, imported or unpickled. Code that comes with a model is
    not run.
    """

    name: str
    """A preset's name or a hub id; for contents, their display name."""
    contents: Mapping[str, Any] | None = None
    """Contents of a Hugging Face config.json; None if there is only a name."""
    kept: Path | None = None
    """File that the server has written the contents to, for references in a run's files. It is not read."""

    @classmethod
    def named(cls, text: str) -> "ServerModel":
        """Returns the model of a preset's name or a hub id.

        Raises:
            WorkloadError: it is neither.
        """
        if not isinstance(text, str) or not _is_name(text):
            raise WorkloadError(
                f"{unknown('model', str(text)[:80], PRESETS)} A hub id (owner/name) works too; a server opens no files of that "
                "name: a config.json travels as `model`, a Python file as `workload`."
            )
        return cls(name=text)

    @classmethod
    def of(cls, contents: Any, kept: Path | None = None) -> "ServerModel":
        """Returns the model of a config.json's contents.

        Raises:
            WorkloadError: they are not a mapping, or load another model by its name.
        """
        if not isinstance(contents, Mapping):
            raise WorkloadError("a model's configuration must be a mapping, such as that of a Hugging Face config.json")
        for name, value in _entries(contents):
            if (name in _LOADED_BY_NAME and value) or (name == "model_type" and value in _LOADERS):
                raise WorkloadError(
                    f"the configuration has {name}={str(value)[:80]!r}, with which transformers loads a model from elsewhere; a "
                    "server takes architectures that transformers builds itself"
                )
        return cls(name=str(contents.get("model_type", "model"))[:100], contents=contents, kept=kept)

    @property
    def is_preset(self) -> bool:
        return self.contents is None and self.name in PRESETS

    def __str__(self) -> str:
        return self.name


def _is_name(text: str) -> bool:
    return text in PRESETS or (
        len(text) <= LONGEST_NAME and ".." not in text and "--" not in text and _HUB_ID.fullmatch(text) is not None
    )


def _entries(document: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a mapping and of nested mappings."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield str(name), value
            yield from _entries(value)
    elif isinstance(document, list):
        for item in document:
            yield from _entries(item)
