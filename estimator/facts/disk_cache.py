"""Disk cache of facts: each workload and variant is traced once."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from ...models.fingerprint import digest
from .model_facts import Attention, Matmul, ModelFacts, Part, PerToken, Rebuilt

VERSION = 8
"""Version of the format, raised when tracing changes, so that older files are ignored."""


def cache_folder() -> Path:
    """`redline` in the user's cache folder: XDG_CACHE_HOME, or `~/.cache`
    (https://specifications.freedesktop.org/basedir-spec/latest/)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "redline"


def key_of(model_id: str, variant: Mapping[str, Any]) -> str:
    """Name of a cache file: digest of the workload's `model_id`, the variant, and the versions of the packages involved."""
    return digest({"version": VERSION, "workload": model_id, "variant": dict(variant), "versions": _versions()})


@cache
def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "transformers")}


def load(key: str, folder: Path | None = None) -> ModelFacts | None:
    """The facts of a key; None if there are none or they cannot be read."""
    data = load_json(Path("facts", f"{key}.json"), folder)
    try:
        return None if data is None else facts_from(data)
    except (KeyError, TypeError, ValueError):  # written by another version, or truncated by a full disk
        return None


def store(key: str, facts: ModelFacts, folder: Path | None = None) -> None:
    """Stores facts. Writes are atomic: a reader gets the whole file or none, even with concurrent writers."""
    store_json(Path("facts", f"{key}.json"), asdict(facts), folder)


def load_json(name: Path, folder: Path | None = None) -> Any:
    """A file of the cache; None if it is missing or not JSON."""
    try:
        return json.loads(((folder or cache_folder()) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def store_json(name: Path, data: Any, folder: Path | None = None) -> None:
    """Writes a file of the cache. If writing fails, nothing is stored, and the next process computes it again."""
    path = (folder or cache_folder()) / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def facts_from(data: Mapping[str, Any]) -> ModelFacts:
    """The inverse of `dataclasses.asdict` for facts.

    Raises:
        KeyError, TypeError, ValueError: the data has another form.
    """
    parts = tuple(_part(part) for part in data["parts"])
    return ModelFacts(**{**_own(ModelFacts, data), "parts": parts, "shape": None, "notes": tuple(data["notes"])})


def _part(data: Mapping[str, Any]) -> Part:
    values: dict[str, Any] = _own(Part, data)
    for field in fields(Part):
        if values.get(field.name) is not None and "PerToken" in str(field.type):
            values[field.name] = PerToken(**values[field.name])
    values["matmuls"] = tuple(Matmul(**matmul) for matmul in data["matmuls"])
    values["rebuilt"] = Rebuilt(**data["rebuilt"])
    values["attention"] = Attention(**data["attention"]) if data["attention"] else None
    return Part(**values)


def _own(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: data[field.name] for field in fields(kind)}
