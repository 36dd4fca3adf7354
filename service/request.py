"""What is asked of a search, as it travels: JSON, and the arguments of `redline.tune` that it comes to where it runs.

    {"target": "gpt2-tiny", "devices": 2, "trials": 16, "fix": {"precision": "fp32"}}

The names are those of `tuner/request.py`. A file of somebody's machine travels as what it holds: in the place of `target`
`model` is a Hugging Face config.json, `workload` a Python file as text with its digest and a name in it, `command` the
fields of a `redline.Command`; `space` is a document of `Space.to_dict`. No text of a request ever becomes a path or an import:
what is resolved are a `ServerModel`, a `ServerCommand`, a `Hardware` of the table and a `Space`, of which none can be a file's,
and names of files are made here.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..base.errors import UsageError
from ..base.reading import Malformed, parse_json, path_of, read_named
from ..models.server_model import ServerModel
from ..runners.command.command import Command, ServerCommand, hidden
from ..space import Space

TRAVELLING = (
    (
        "devices",
        "seq_len",
        "global_batch",
        "lora",
        "allow",
        "baseline",
        "override",
        "fix",
        "trials",
        "time",
        "device_hours",
    )
    + ("patience", "sampler", "headroom", "layerwise", "soak", "seed", "runner", "hardware", "memory_limit")
    + ("trial_timeout", "measure_time", "concurrency")
)
"""Fields of a request that travel as they are."""
TARGETS = ("target", "model", "workload", "command")
"""What is tuned: one of these."""
LARGEST_FILE = 512 * 1024
"""Bytes of a file that travels."""
LONGEST_SHOWN = 200
"""Characters of a text that lists show."""
NO_WORKLOADS = (
    "this server runs no workload's file: its searchers would run it as the server's own user; submit a --command, a model's "
    "name or a config.json instead"
)
_MODEL, _CODE = "model/config.json", "workload.py"


def travelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `redline.tune` as a request that travels; files of this machine are read.

    Args:
        given: by name, `target` among them; None and what is empty is left out.

    Raises:
        UsageError: a file cannot be read, or something belongs to this machine alone.
    """
    asked = {name: each for name, each in given.items() if each is not None and each not in ((), {}, "", [])}
    out = _target(asked.pop("target", None))
    if (space := asked.pop("space", None)) is not None:
        out["space"] = (Space.from_yaml(space) if isinstance(space, (str, Path)) else space).to_dict()
    for name, value in asked.items():
        if name not in TRAVELLING:
            raise UsageError(
                f"{name} belongs to the machine that a search runs on, and does not travel to a server; leave it out"
            )
        out[name] = list(value) if isinstance(value, tuple) else value
    return out


def _target(target: Any) -> dict[str, Any]:
    if isinstance(target, Command):
        if target.render:
            raise UsageError("a command's --render reads files of this machine, which do not travel to a server")
        return {"command": target.to_dict()}
    if not isinstance(target, (str, Path)):
        raise UsageError(
            f"a search on a server is of a model, a FILE:NAME or a Command, but got {type(target).__name__}: objects do "
            "not travel"
        )
    text = str(target)
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        return {"workload": {"text": _text(path), "sha256": digest(_text(path)), "name": name}}
    if isinstance(target, Path) or text.startswith(("/", "./", "../", "~")) or text.endswith(".json"):
        where = path_of(text)
        return {"model": _configuration(where / "config.json" if where.is_dir() else where)}
    return {"target": text}


def _text(path: str | Path) -> str:
    try:
        return read_named(path_of(path), at_most=LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be sent to the server: {getattr(error, 'strerror', None) or error}") from None


def _configuration(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(_text(path).encode())
    except Malformed as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a Hugging Face model's configuration: it holds no mapping")
    return found


def digest(text: str) -> str:
    """SHA-256 of a text, hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_code(request: Mapping[str, Any]) -> bool:
    """Whether running it runs somebody's own code."""
    return "workload" in request or "command" in request


def without_secrets(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request as it may be shown: what a command's environment holds is for its dry runs alone."""
    out = dict(request)
    if "command" in out:
        out["command"] = {**out["command"], **({"env": hidden(env)} if (env := out["command"].get("env")) else {})}
    return out


def brief(request: Mapping[str, Any]) -> dict[str, Any]:
    """What of a request is short: numbers, truth values and short texts."""
    return {
        name: value
        for name, value in request.items()
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= LONGEST_SHOWN)
    }


def arguments(request: Mapping[str, Any], folder: Path, *, code: bool = True) -> dict[str, Any]:
    """What `redline.tune` is called with for a request that travelled; for workers those of `tuner/request.py`'s Request.

    Args:
        request: as it was kept when it was accepted.
        folder: of this search on this machine; files that it holds are written there, under names made here.
        code: whether a workload's file may be run by this process. A command's program is not started here in any case.

    Raises:
        UsageError: it is damaged, names something else than it may, or is code that is not run here.
    """
    if "workload" in request and not code:
        raise UsageError(NO_WORKLOADS)
    if len(found := [name for name in TARGETS if name in request]) != 1:
        raise UsageError(f"a request must have one of {', '.join(TARGETS)}, but has {', '.join(found) or 'none'}")
    out = {name: request[name] for name in TRAVELLING if name in request}
    out["target"] = _found(request, folder)
    if "hardware" in out:
        from ..estimator.hardware import named_hardware

        out["hardware"] = named_hardware(out["hardware"])
    if "space" in request:
        out["space"] = Space.from_dict(request["space"])
    return out


def _found(request: Mapping[str, Any], folder: Path) -> Any:
    if "command" in request:
        known = {each.name for each in fields(Command)} - {"render"}
        return ServerCommand(**{name: value for name, value in request["command"].items() if name in known})
    if "model" in request:
        return ServerModel.of(request["model"], _put(folder / _MODEL, json.dumps(request["model"], indent=2)))
    if "workload" in request:
        code = request["workload"]
        if digest(code["text"]) != code["sha256"]:
            raise UsageError("the workload's text is not that of its digest: it was damaged on its way; send it again")
        return f"{_put(folder / _CODE, code['text'])}:{code['name']}"
    return ServerModel.named(request["target"])


def _put(path: Path, text: str) -> Path:
    """Writes a file unless it is there as it should be, all of it or nothing."""
    if not (path.is_file() and path.read_text(encoding="utf-8") == text):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    return path.resolve()
