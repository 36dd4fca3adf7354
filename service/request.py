"""A search request as JSON, and its conversion to the arguments of `redline.tune` where it runs.

    {"target": "gpt2-tiny", "devices": 2, "trials": 16, "fix": {"precision": "fp32"}}

The names are those of `tuner/request/options.py`. A file of the client is sent as its contents. Instead of `target`, a request
may have `model` (a Hugging Face config.json), `workload` (a Python file as text, and a name in it) or
`command` (the fields of a `redline.Command`). `space` is a document of `Space.to_dict`. No text of a request becomes a
path or an import: it is converted to a `ServerModel`, a `ServerCommand`, a `Hardware` of the table or a `Space`, none
of which can name a file, and the names of files are made here.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..base.errors import UsageError, unknown
from ..base.option import option, options_of
from ..base.reading import Malformed, parse_json, path_of, read_named
from ..knobs.strategy import MAX_DEVICES
from ..models.presets import ServerModel
from ..runners.command.command import Command, ServerCommand, hidden
from ..space import Space
from ..tuner.request.options import SECTIONS, RunRequest

TRAVELLING: Mapping[str, float | None] = {
    "devices": MAX_DEVICES, "seq_len": 1 << 24, "global_batch": 1 << 24, "lora": None,
    "space": None, "allow": None, "override": None, "fix": None,
    "trials": 100_000, "time": 1e9, "patience": 1 << 30, "sampler": None, "layerwise": None, "seed": 1 << 53,
    "hardware": None, "memory_limit": 1e12, "trial_timeout": 1e9, "measure_time": 1e9, "concurrency": 4096,
}  # fmt: skip
"""Fields of a request that are sent, with the largest number that a server takes: far above what anybody needs, and small
enough for its database and its loops. The others name files and devices of the user's machine. All but `space` are sent
unchanged."""
OF_A_COMMAND = (
    "command",
    "launcher",
    "model",
    "env",
    "metric",
    "direction",
    "samples",
    "require",
    "no_observe",
)
"""Fields of a command that are sent: all but `render`, which reads files of the user's machine."""
TARGETS = ("target", "model", "workload", "command")
"""Fields of which a request has exactly one: the target of the search."""
LARGEST_FILE = 512 * 1024
"""Largest file that is sent, bytes."""
NO_CODE = "this server does not run submitted code, such as a workload or a command; submit a model's name or config.json instead"
_MODEL, _CODE = "model/config.json", "workload.py"


def travelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `redline.tune` as a request to send. Local files are read.

    Args:
        given: arguments by name, including `target`; None and empty values are left out.

    Raises:
        UsageError: a file cannot be read, or an argument only applies to the local machine.
    """
    tune_arguments = {
        name: value for name, value in given.items() if value is not None and value not in ((), {}, "", [])
    }
    request = _target(tune_arguments.pop("target", None))
    if (space := tune_arguments.pop("space", None)) is not None:
        request["space"] = (Space.from_yaml(space) if isinstance(space, (str, Path)) else space).to_dict()
    defaults = {field.name: field.default for field in fields(RunRequest)}
    declared = {field.name for section in SECTIONS for field, _ in options_of(section)}
    for name, value in tune_arguments.items():
        if name not in declared:
            raise UsageError(unknown("argument", name, (*TRAVELLING, "space", "target")))
        if name not in TRAVELLING:
            if name in defaults and value == defaults[name]:
                continue
            raise UsageError(
                f"{option(name)} only applies to the machine that a search runs on and cannot be sent to a server; "
                "leave it out"
            )
        request[name] = list(value) if isinstance(value, tuple) else value
    return request


def _target(target: Any) -> dict[str, Any]:
    if isinstance(target, Command):
        if target.render:
            raise UsageError(
                "a command's `render` reads files of this machine and cannot be sent to a server; leave it out"
            )
        return {"command": target.to_dict()}
    if not isinstance(target, (str, Path)):
        raise UsageError(
            f"the target of a search on a server must be a model, a FILE:NAME or a Command, but got "
            f"{type(target).__name__}: objects cannot be sent"
        )
    text = str(target)
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        return {"workload": {"text": _text(path), "name": name}}
    if isinstance(target, Path) or text.startswith(("/", "./", "../", "~")) or text.endswith(".json"):
        folder_or_file = path_of(text)
        file = folder_or_file / "config.json" if folder_or_file.is_dir() else folder_or_file
        return {"model": _configuration(file)}
    return {"target": text}


def _text(path: str | Path) -> str:
    try:
        return read_named(path_of(path), at_most=LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be sent to the server: {getattr(error, 'strerror', None) or error}") from None


def _configuration(path: Path) -> dict[str, Any]:
    try:
        configuration = parse_json(_text(path).encode())
    except Malformed as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(configuration, dict):
        raise UsageError(f"{path} is not a Hugging Face model's configuration: it must be a mapping")
    return configuration


def is_code(request: Mapping[str, Any]) -> bool:
    """True if the request runs code that the user submitted."""
    return "workload" in request or "command" in request


def without_secrets(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request with the values of a command's environment hidden."""
    command = request.get("command")
    if command is None or not command.get("env"):
        return dict(request)
    return {**request, "command": {**command, "env": hidden(command["env"])}}


def arguments(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the arguments of `redline.tune` for a received request.

    Args:
        request: as stored when it was accepted.
        folder: of this search on this machine. Files that the request contains are written there, under names made
            here.

    Raises:
        UsageError: the request has an invalid name.
    """
    tune_arguments = {name: request[name] for name in TRAVELLING if name in request and name != "space"}
    tune_arguments["target"] = _received_target(request, folder)
    if "hardware" in request:
        from ..estimator.hardware import named_hardware

        tune_arguments["hardware"] = named_hardware(request["hardware"])
    if "space" in request:
        tune_arguments["space"] = Space.from_dict(request["space"])
    return tune_arguments


def _received_target(request: Mapping[str, Any], folder: Path) -> Any:
    if "command" in request:
        names = {field.name for field in fields(Command)} - {"render"}
        return ServerCommand(**{name: value for name, value in request["command"].items() if name in names})
    if "model" in request:
        return ServerModel.of(request["model"], _put(folder / _MODEL, json.dumps(request["model"], indent=2)))
    if "workload" in request:
        code = request["workload"]
        return f"{_put(folder / _CODE, code['text'])}:{code['name']}"
    return ServerModel.named(request["target"])


def _put(path: Path, text: str) -> Path:
    """Writes a file atomically unless it already has that content."""
    if not (path.is_file() and path.read_text(encoding="utf-8") == text):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    return path.resolve()
