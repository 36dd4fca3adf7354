"""run.yaml: the request of a run, and the check that two requests can share its trials."""

import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import StudyError
from ..base.option import option
from ..base.writing import as_data
from . import environment, schema, table
from .names import LEDGER, RUN, TABLE
from .storage import without_password

FORMAT = 1
"""Version of run.yaml's format; raised when older versions could misread it."""

BINDING = ("workload", "space", "devices", "seq_len", "global_batch", "memory_limit_mib", "simulated", "emulated")
"""Keys that must be the same for trials to be comparable. If a workload has an `id`, only that counts."""

INFORMATIVE = ("model", "sampler", "seed", "runner", "trial_timeout_s")
"""Keys that may change when a run is resumed, with a note."""

_MEMORY_TOLERANCE = 0.05
"""Relative difference in the memory of a device that is not a conflict."""


def read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the contents of the run.yaml in `folder`, and the parts that were left out, in words
    (`schema.REQUEST`).

    Raises:
        StudyError: it cannot be read, is damaged, or comes from a newer redline.
    """
    try:
        return known_parts(schema.read_mapping(folder, RUN), folder / RUN)
    except FileNotFoundError:
        raise StudyError(f"there is no '{folder / RUN}'; restore it or give another {option('out')}") from None


def known_parts(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the valid parts of a run.yaml's document, and the parts that were left out, in words.

    Raises:
        StudyError: it has another format, or no request.
    """
    version = document.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise StudyError(
            f"'{path}' is not a run of redline: its format is {schema.shortened(version)}, not a number; give "
            f"another {option('out')}"
        )
    if version > FORMAT:
        raise StudyError(
            f"'{path}' was written by a newer redline (format {schema.shortened(version)}, this one knows up to {FORMAT}); "
            f"install that redline, or give another {option('out')}"
        )
    if not isinstance(document.get("asked"), dict) or not isinstance(document.get("study"), str):
        raise StudyError(
            f"'{path}' does not contain the request of the run; restore it or give another {option('out')}"
        )
    return schema.clean(document, schema.REQUEST, path.name)


def begin(path: Path, request: Mapping[str, Any], storage: str | None) -> dict[str, Any]:
    """Returns the run.yaml of a new run in the folder `path`, without the storage's password."""
    return {
        "format": FORMAT,
        "run": uuid.uuid4().hex,
        "study": path.resolve().name or "redline",
        "storage": storage and without_password(storage),
        "created": _now(),
        "asked": as_data(request),
        "environment": environment.describe(),
    }


def resume(path: Path, request: Mapping[str, Any], storage: str | None) -> tuple[dict[str, Any], list[str]]:
    """Returns the run.yaml of a resumed run in the folder `path`, and notes for the user.

    Raises:
        StudyError: its request was different (the message states how), or a file is missing.
    """
    if not (path / RUN).exists():
        raise StudyError(
            f"'{path}' cannot be resumed: {RUN} is missing, so its request is unknown; restore it or give another {option('out')}"
        )
    document, faults = read(path)
    if faults or not isinstance(document.get("run"), str):
        raise StudyError(
            f"'{path}' cannot be resumed, since {RUN} is damaged: {'; '.join(faults[:3]) or 'it has no run id'}. "
            f"Restore it or give another {option('out')}"
        )
    stored = document.get("storage")
    if stored and storage is None:
        raise StudyError(
            f"'{path}' has its trials in the storage '{stored}', which is opened only if you name it: add "
            f"{option('storage', stored)}, with the password if it needs one"
        )
    # A run that was killed at its start has no ledger yet, but then it has no rows either.
    if not stored and not (path / LEDGER).exists() and (path / TABLE).exists() and len(table.read(path / TABLE)):
        raise StudyError(
            f"'{path}' cannot be resumed: its ledger {LEDGER} is missing and {TABLE} has trials that "
            f"would be lost; restore it or give another {option('out')}"
        )
    request = as_data(request)
    refused = conflicts(document["asked"], request)
    if storage is not None and without_password(storage) != stored:
        refused.append(f"storage: was {stored or LEDGER}, now {without_password(storage)}")
    if refused:
        raise StudyError(
            f"'{path}' cannot be resumed, since its request was different: {'; '.join(refused)}. "
            f"Repeat the same request, or give another {option('out')}"
        )
    previous_environment: dict[str, Any] = document.get("environment", {})
    for resumption in document.setdefault("resumed", []):
        previous_environment = resumption
    versions = environment.versions()
    changed = changes(document["asked"], request)
    notes = [
        *changed,
        *(
            f"{change} (speeds measured before and after may not compare)"
            for change in version_changes(previous_environment.get("versions", {}), versions)
        ),
    ]
    if "request" in request:
        document["asked"]["request"] = request["request"]
    document["resumed"].append({"at": _now(), "versions": versions, "changes": changed})
    return document, notes


def conflicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two requests that prevent resuming the old one's run, as `key: was X, now Y`."""
    return [change for key in BINDING for change in _differences(key, _binding(old, key), _binding(new, key))]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two requests that do not prevent resuming, in the same form."""
    return [change for key in INFORMATIVE for change in _differences(key, old.get(key), new.get(key))]


def version_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Returns the versions that differ, in the same form."""
    return [
        f"{name}: was {old.get(name, 'not installed')}, now {new.get(name, 'not installed')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _binding(request: Mapping[str, Any], key: str) -> Any:
    value = request.get(key)
    if key == "workload" and isinstance(value, Mapping) and "id" in value:
        return {"id": value["id"]}
    if key == "devices" and isinstance(value, Mapping):
        # The devices per host of a cluster are known only after its runner has started.
        value = {name: fact for name, fact in value.items() if name != "per_host"}
    # Converted as by YAML, so that a tuple equals the list that it was written as.
    return yaml.safe_load(yaml.safe_dump(as_data(value)))


def _differences(key: str, old: Any, new: Any) -> list[str]:
    old, new = _by_name(old), _by_name(new)
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [change for name in names for change in _differences(f"{key}.{name}", old.get(name), new.get(name))]
    if schema.number(old) and schema.number(new):
        # A kernel update can change the reported memory of a machine slightly.
        tolerance = _MEMORY_TOLERANCE if key == "devices.memory_mib" else 0.0
        same = math.isclose(old, new, rel_tol=tolerance)
    else:
        same = _flow(old) == _flow(new)  # unlike ==, distinguishes True from 1
    explanation = " (its code, data or sizes have changed)" if key == "workload.id" else ""
    return [] if same else [f"{key}: was {_words(old)}, now {_words(new)}{explanation}"]


def _by_name(value: Any) -> Any:
    """Converts a list of mappings with names to a mapping, so that knobs are compared by name."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) and "name" in entry for entry in value):
        names = [str(entry["name"]) for entry in value]
        if len(set(names)) == len(names):
            return dict(zip(names, value))
    return value


def _flow(value: Any) -> str:
    flow = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return flow.removesuffix("\n").removesuffix("\n...")


def _words(value: Any) -> str:
    value_text = "not given" if value is None else _flow(value)
    return value_text if len(value_text) <= 200 else value_text[:199] + "…"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
