"""`redline tune`: search for the fastest configuration."""

import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from ..base.errors import UsageError
from ..base.reading import path_of
from ..models.request import SpaceRequest
from ..models.resolve import located
from ..results.best import load
from ..results.names import fresh_folder
from ..runners.command.command import Command
from ..tuner.request.options import SECTIONS, Request
from . import exit_codes
from .options import GroupedCommand, command_of, file_fields, options_of, request_of

EXAMPLES = f"""\b
Examples:
  redline tune gpt2-tiny
  redline tune gpt2 --seq-len 1024 --global-batch 64 --trials 30 --out runs/gpt2
  redline tune gpt2-tiny --memory-limit 1GiB --set micro_batch=4,8,16 --fix precision=fp32
  redline tune llama-tiny --devices 2 --global-batch 16
  redline tune llama2-7b --lora r=16 --seq-len 2048
  redline tune path/to/config.json --time 30m --sampler hebo
  redline tune --workload train.py:workload --runner local
  redline tune plan.yaml                       start with the plans of `redline estimate -o plan.yaml`
  redline tune --out runs/gpt2 --resume
  redline tune gpt2-tiny --log-to tensorboard
  redline tune gpt2 --memory-limit 4GiB --layerwise
  redline tune --command "python train.py --batch-size {{micro_batch}}" --space knobs.yaml

\b
Fields of --command-file besides those with an option:
{file_fields(Command)}
"""
TARGETS = ("target", "workload", "command")
"""Parameters that name the target of the search."""
DRY_COMMANDS = 3
"""Number of commands that `--dry` prints."""


GROUPS = {
    "Target": ("workload", "devices", "seq_len", "global_batch", "lora"),
    "Search space": tuple(field.name for field in fields(SpaceRequest)),
    "Budget": ("trials", "time", "patience"),
    "Devices": ("runner", "hardware", "memory_limit", "ray_address", "device_kind"),
    "Results": ("out", "resume", "as_json", "log_to"),
    "Your own command": ("command", "launcher", "model", "metric", "command_file", "dry"),
}
"""Options in the order of the help, by name of the parameter; all others are advanced."""


@click.command(epilog=EXAMPLES, cls=GroupedCommand, groups=GROUPS)
@options_of(*SECTIONS, Command)
@click.option("--command-file", metavar="FILE", help="A YAML file with --command and further fields, listed below.")
@click.option("--dry", is_flag=True, help="Print the commands of the first trials without starting them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def tune(as_json: bool, dry: bool, command_file: str | None, **options: Any) -> int:
    """Find the configuration that trains MODEL fastest on the available devices.

    MODEL is a name (`redline models`), a folder or config.json of a Hugging Face model, or a hub id. Weights are not
    needed. A plan of `redline estimate -o` or a best.yaml contains the model, its sizes and the first candidates. Every
    candidate is built and trained for some steps in fresh processes.

    Instead of MODEL, tune a command of your own: `--command "python train.py --batch {micro_batch}" --space
    knobs.yaml`.

    Exit codes: 0 found, 1 the machinery failed, such as a lost Ray cluster, 2 bad usage or input, 3 nothing feasible,
    4 others use the cluster's devices, 130 interrupted. Results are kept.
    """
    if options["resume"] and options["out"] and not any([command_file, *map(options.get, TARGETS)]):
        command, request_values = _resumed(options)
    else:
        command = command_of(options, command_file)
        plan = options["target"] if _is_plan(options["target"]) else None
        moved = options.pop("workload") if plan else None
        request_values = request_of({"workload": None, **options}, command)
        if plan:
            _begin_with_plan(request_values, path_of(plan), moved)
    if dry:
        _print_commands(command, request_values)
        return 0
    if request_values["out"] is None and not request_values["resume"]:
        request_values["out"] = run_folder(command.name if command else request_values["target"])
    Request(**request_values).check_values()  # in a second, before slow imports
    from ..tuner.tuning import run_search
    from .outcome import print_result
    from .progress import listener_for
    from .streams import outlive_reader

    outlive_reader()
    listener = listener_for(sys.stderr if as_json else sys.stdout, silent=as_json)
    end_in_order()
    with listener:
        result = run_search(Request(**request_values, listener=listener))
    if as_json:
        click.echo(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print_result(result, of_command=command is not None, storage=request_values["storage"])
    if result.interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.FOUND if result.best is not None else exit_codes.NOTHING_FEASIBLE


def _resumed(options: dict[str, Any]) -> tuple[Command | None, dict[str, Any]]:
    """Returns the command and the request of the run in `--out`, with the options of this command line in their place."""
    from ..tuner.request.record import request_again

    again = request_again(options["out"])
    target = again.pop("target")
    for field in fields(Command):
        if options.pop(field.name, None):
            raise UsageError(f"--{field.name.replace('_', '-')} belongs to --command: repeat the run's whole command")
    source = click.get_current_context().get_parameter_source
    request_values = request_of(options, target)
    recorded = {name: value for name, value in again.items() if source(name) is not ParameterSource.COMMANDLINE}
    return target if isinstance(target, Command) else None, {**request_values, **recorded}


def _is_plan(target: str | None) -> bool:
    """Returns True for an existing YAML file."""
    return target is not None and target.endswith((".yaml", ".yml")) and path_of(target).is_file()


def _begin_with_plan(request_values: dict[str, Any], path: Path, moved: str | None) -> None:
    """Starts a search with the configurations of a plan or a best.yaml; its model and sizes are defaults.

    Args:
        moved: `--workload`, in place of the file's own workload; None for none.

    Raises:
        UsageError: it does not name a model.
    """
    plan = load(path)
    trained = plan.trains.get("workload") or {}
    if not (spec := trained.get("spec")):
        raise UsageError(f"'{path}' does not name a model to tune: give MODEL")
    plan_values: dict[str, Any] = {name: plan.trains.get(name) for name in ("seq_len", "global_batch")}
    plan_values |= {"devices": (plan.trains.get("devices") or {}).get("used"), "lora": trained.get("lora")}
    if limit := plan.trains.get("memory_limit_mib"):
        plan_values["memory_limit"] = f"{limit:g}MiB"
    for name, value in plan_values.items():
        request_values[name] = value if request_values.get(name) is None else request_values[name]
    request_values["target"] = located(spec, moved, str(path))
    request_values["begin_with"] = (plan.trial.config, *plan.others)


def _print_commands(command: Command | None, request_values: dict[str, Any]) -> None:
    """Prints the commands of the default configuration and of some others."""
    from ..tuner.request.target import resolve_task

    if command is None:
        raise UsageError("--dry prints commands; give one with --command or --command-file")
    request = Request(**request_values)
    task = resolve_task(request)
    assert task.command is not None, "a command was given"
    for note in task.notes:
        click.echo(f"note: {note}", err=True)
    configs = dict.fromkeys([task.space.default(), *task.space.sample(DRY_COMMANDS - 1, seed=request.seed)])
    for number, config in enumerate(configs):
        folder = Path(request_values["out"] or run_folder(command.name), "trials", str(number))
        click.echo(task.command.rendered(config, number, folder))


def run_folder(target: str) -> str:
    """Returns a folder for a new run of a target that does not exist yet."""
    name = Path(target.split(":")[0]).stem if ".py:" in target else Path(target).name.removesuffix(".json")
    return str(fresh_folder("runs", name))


def end_in_order() -> None:
    """Lets SIGTERM and SIGHUP end the search like Ctrl-C, with its results so far."""
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # further output would fail
            null = os.open(os.devnull, os.O_WRONLY)
            for stream in terminals:
                os.dup2(null, stream)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        signal.signal(signal.SIGHUP, interrupt)
