"""Records of a request: its entry in run.yaml, the plan for listeners, and the command that measures the winner again."""

import inspect
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import StudyError
from ...base.option import option, options_of
from ...base.reading import absolute
from ...base.writing import as_data, cannot_write, write_atomic
from ...knobs.strategy import BLOCK_KNOBS
from ...knobs.text import exact_text
from ...models.architecture import class_of, shape_of
from ...models.presets import ServerModel
from ...models.skeleton import UNABLE
from ...models.workload import Workload
from ...results import RunFolder, summary
from ...runners import Runner
from ...runners.command.command import Command
from ..listener import SearchPlan
from .options import SECTIONS, Request

if TYPE_CHECKING:
    from .target import Task

COMMAND_FILE = "command.yaml"
"""File of a run's folder with its command, if options alone cannot describe it."""
_OF_A_START = ("out", "resume", "storage")
"""Options that belong to one start of a search: a resumed search takes them from its own command line."""


def asked_of(request: Request, task: "Task") -> dict[str, Any]:
    """Returns the description of the request for run.yaml."""
    workload = task.workload
    workload_entry: dict[str, Any] = {}
    if task.command is not None:
        workload_entry["command"] = shlex.join(_described(task.command.requested))
    elif workload is not None:
        workload_entry["id"] = workload.id
    else:
        workload_entry["callable"] = task.name
        if request.direction == "min":
            workload_entry["direction"] = "min"
    if workload is not None:
        workload_entry["spec"] = str(workload.spec)
    if workload is not None and (class_name := class_of(workload.model)):
        workload_entry["class"] = class_name
    if workload is not None and (optimizer := optimizer_settings(workload)):
        workload_entry["optimizer"] = optimizer
    if (lora := getattr(workload and workload.model, "lora", None)) is not None:
        workload_entry["lora"] = str(lora)
    shape = shape_of(workload.model) if workload else None
    return {
        "model": task.name,
        "workload": workload_entry,
        **({"shape": shape} if shape else {}),
        "space": task.space.to_dict(describe_callables=True),
        "devices": {**task.shown.to_dict(), "used": task.devices, "per_host": _per_host(task)},
        "seq_len": workload.seq_len if workload else None,
        "global_batch": task.own.global_batch
        if task.own
        else request.global_batch or (task.trained.global_batch if task.trained else None),
        "memory_limit_mib": request.limit_mib,
        "sampler": request.sampler,
        "seed": request.seed,
        "runner": request.runs_on,
        "trial_timeout_s": request.timeout_s,
        **({"emulated": True} if task.emulated else {}),
        **({"lossy": task.lossy} if task.lossy else {}),
        **({"request": again} if (again := _request_to_repeat(request, task)) else {}),
    }


def _request_to_repeat(request: Request, task: "Task") -> dict[str, Any]:
    """Returns the values of a request that differ from the defaults, with absolute paths, for `request_again`; empty if one
    of them is an object that a file cannot contain.
    """
    names = [field.name for section in SECTIONS for field, _ in options_of(section) if field.name not in _OF_A_START]
    values = request.given(*names, "begin_with")
    for name in ("space", "hardware"):
        if isinstance(value := values.get(name), Path) or (isinstance(value, str) and Path(value).is_file()):
            values[name] = absolute(value)
    if warm := values.get("warm_start"):
        values["warm_start"] = [absolute(run) for run in ([warm] if isinstance(warm, (str, Path)) else warm)]
    if task.command is not None:
        command = task.command.requested
        target: Any = None if command.hides_env else command.to_dict()
    else:
        target = task.workload.spec if task.workload and isinstance(request.target, (str, Path)) else None
    try:
        return as_data({"target": target, **values}) if target else {}
    except TypeError:
        return {}


def request_again(folder: str | Path) -> dict[str, Any]:
    """Returns the values of the request of a run, by field of `Request`, to resume it.

    Raises:
        StudyError: the folder has no run, or run.yaml does not contain its request.
    """
    RunFolder.check(folder, resume=True)
    values = dict(RunFolder.asked(folder).get("request") or {})
    target = values.get("target")
    if not isinstance(target, (str, dict)) or not values.keys() <= {field.name for field in fields(Request)}:
        raise StudyError(
            f"'{folder}' cannot be resumed by its folder alone, since run.yaml does not contain all of its request: repeat the "
            f"same command or call with {option('resume', True)}"
        )
    if isinstance(target, dict):
        if "command" not in target or not target.keys() <= {field.name for field in fields(Command)}:
            raise StudyError(
                f"'{folder}' cannot be resumed by its folder alone: the command in its run.yaml is damaged"
            )
        values["target"] = Command(**target)
    return values


def _per_host(task: "Task") -> int:
    """Returns the number of devices of a host, as seen from this machine. On a cluster the runner corrects it."""
    return task.shown.count if task.emulated or task.device.type == "cuda" else task.devices


def plan_of(
    request: Request, task: "Task", folder: RunFolder, runner: Runner, default: Mapping[str, Any]
) -> SearchPlan:
    """Returns the plan of the search for its listener. `default` is the first configuration of a new search."""
    count = f"{task.devices} x " if task.devices > 1 else ""
    recorded_default = summary.default(folder.trials())
    return SearchPlan(
        name=task.name,
        model_class=class_of(task.workload.model) if task.workload is not None else None,
        where=f"{count}{task.shown.name}" + (f", emulated on {task.device.name}" if task.stands_for else ""),
        valid=len(task.space) if task.space.enumerable else None,
        trials=request.budget.trials,
        seconds=request.budget.seconds,
        earlier=tuple(trial for trial in folder.trials() if not trial.pending),
        sampler=request.sampler,
        runner=runner.name,
        default=default if recorded_default is None else recorded_default.config,
        derived=frozenset(knob.name for knob in task.space.knobs if knob.derived),
        folder=folder.path if request.out is not None else None,
    )


def command_of(request: Request, task: "Task", limit_mib: float | None, trials: Sequence[Any]) -> list[str]:
    """Returns the command line that measures the winner again.

    Args:
        request: the request. Values of the winner may exist only in its space or its overrides.
        task: target of the search.
        limit_mib: memory of a device, MiB.
        trials: trials of the search.
    """
    target = request.target
    if task.command is not None:
        requested, command_file = task.command.requested, Path(request.out or "", COMMAND_FILE)
        source = ["--command-file", str(command_file)] if _needs_file(requested) else _described(requested)
        command = ["redline", "tune", *source, "--devices", str(task.devices)]
        for name in ("seq_len", "global_batch", "lora"):
            if (value := getattr(request, name)) is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
    elif task.workload is not None and isinstance(target, (str, Path, ServerModel)):
        target_arguments = ["--workload", task.workload.spec] if ".py:" in task.workload.spec else [task.workload.spec]
        command = ["redline", "tune", *target_arguments, "--devices", str(task.devices)]
        if task.workload.seq_len:
            command += ["--seq-len", str(task.workload.seq_len)]
        if not task.free_batch:
            command += ["--global-batch", str(task.workload.global_batch)]
        lora = getattr(task.workload.model, "lora", None)
        if lora is not None:
            command += ["--lora", str(lora)]
    else:
        return [Path(sys.executable).name, *sys.argv]
    if isinstance(request.space, (str, Path)):
        # A command runs in the same working directory; other paths are made absolute.
        command += ["--space", str(request.space) if task.command is not None else absolute(request.space)]
    for name, values in (request.override or {}).items():
        between = ";" if name in BLOCK_KNOBS else ","
        command += ["--set", f"{name}={between.join(exact_text(value) for value in values)}"]
    for name, value in request.given("runner", "hardware", "trial_timeout", "measure_time").items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif isinstance(value, (str, Path, int, float)):
            file = name == "hardware" and task.command is None and Path(str(value)).is_file()
            command += [flag, absolute(str(value)) if file else str(value)]
    if limit_mib is not None:
        command += ["--memory-limit", f"{limit_mib:.12g}MiB"]
    winner = summary.best(trials)
    if winner is not None:
        chosen = [knob.name for knob in task.space.knobs if not knob.derived]
        for name in dict.fromkeys((*chosen, *BLOCK_KNOBS)):
            if name in winner.config:
                command += ["--fix", f"{name}={exact_text(winner.config[name])}"]
        command += ["--trials", "1"]
    return [*command, "--seed", str(request.seed)]


def keep_command(command: Command, folder: Path) -> None:
    """Writes a command that options alone cannot describe into a run's folder, for the command line of the winner.

    Raises:
        StudyError: it cannot be written.
    """
    import yaml

    if not _needs_file(command):
        return
    content = yaml.safe_dump(as_data(command.to_dict()), sort_keys=False, allow_unicode=True)
    try:
        write_atomic(folder / COMMAND_FILE, content.encode(), durable=False)
    except OSError as error:
        raise cannot_write(folder / COMMAND_FILE, error) from error


def _needs_file(command: Command) -> bool:
    """True if fields of a command are set that have no option on the command line."""
    return bool({field.name for field, option in options_of(Command) if option.in_file} & command.to_dict().keys())


def _described(command: Command) -> list[str]:
    """Returns the options that describe a command, including those that only its file has."""
    arguments = []
    for name, value in command.to_dict().items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif name == "command" and not isinstance(value, str):
            arguments += [flag, shlex.join(value)]
        else:
            items = [value] if isinstance(value, str) else value
            arguments += [argument for item in items for argument in (flag, item)]
    return arguments


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that select an implementation: knobs do so here."""


def optimizer_settings(workload: Workload) -> dict[str, Any] | None:
    """Returns the optimizer that a workload defines as JSON-ready data; None if it defines none and trains with AdamW.

    `class` is the name of its class. The other entries are settings by name: the learning rate, those that differ from the
    defaults of the class, and `groups`, the number of parameter groups, if their settings differ. `class` is empty, and the only
    entry, if the workload's function cannot create an optimizer for a single parameter.
    """
    import torch

    if workload.optimizer is None:
        return None
    try:
        optimizer = workload.make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))], fused=False)
    except UNABLE:
        # The function reads parameters of the model by name or number. An error of the user's is reported by the trials.
        return {"class": ""}
    parameters = inspect.signature(type(optimizer).__init__).parameters
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in optimizer.defaults.items()
        if name not in _IMPLEMENTATION
        and isinstance(value, (bool, int, float, str, tuple))
        and name in parameters
        and (name == "lr" or value != parameters[name].default)
    }
    if any(group[name] != value for group in optimizer.param_groups for name, value in optimizer.defaults.items()):
        settings["groups"] = len(optimizer.param_groups)
    module = type(optimizer).__module__
    name = type(optimizer).__qualname__
    return {"class": f"torch.optim.{name}" if module.startswith("torch.optim.") else f"{module}.{name}", **settings}
