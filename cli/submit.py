"""`redline submit`: a search on a server."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..models.request import ModelRequest, SpaceRequest
from ..runners.command.command import Command
from ..tuner.request import RunRequest, SearchRequest
from . import exit_codes
from .options import command_of, options_of, request_of
from .server_options import PRIORITY, client_of, reached

if TYPE_CHECKING:
    from ..service.client import SearchRun

OF_THE_QUEUE = ("name", "priority", "device", "reuse", "visibility", "key")


@click.command(
    epilog="""\b
Examples:
  redline submit gpt2-tiny --wait
  redline submit llama2-7b --devices 8 --global-batch 512 --trials 30 --priority 5
  redline submit path/to/config.json --device h100 --time 2h
  redline submit --workload train.py:workload --reuse
  redline submit llama2-7b --runner simulate --hardware h100-80gb --devices 64 --wait
""",
    short_help="Submit a search to a server.",
)
@options_of(ModelRequest, SpaceRequest, SearchRequest, RunRequest, Command)
@click.option("--name", default="", metavar="TEXT", help="What people call it.  [default: the model's name]")
@click.option(
    "--priority",
    type=PRIORITY,
    default="normal",
    show_default=True,
    metavar="N",
    help="Higher goes first: low, normal, high, urgent, or from -100 to 100.",
)
@click.option("--device", default="", metavar="NAME", help="Kind of device, such as h100 or cpu.  [default: any]")
@click.option("--reuse", is_flag=True, help="Answer what was measured before on the same hardware from the store.")
@click.option(
    "--visibility",
    type=click.Choice(["own", "team", "all"]),
    default="all",
    show_default=True,
    help="Who sees it beside its owner and admins.",
)
@click.option("--key", metavar="TEXT", help="The same key is the same search, however often it is submitted.")
@click.option("--wait", is_flag=True, help="Show what happens until it ends.")
@reached
def submit(server: str, token: str | None, trust: str | None, wait: bool, **options: Any) -> int:
    """Submit a search of MODEL to a server, as `redline tune` would make it here. Prints its id.

    --devices is 1 unless given. A config.json, a space and a file with a workload travel as what they hold.
    """
    own = {name: options.pop(name) for name in OF_THE_QUEUE}
    run = submitted(request_of(options, command_of(options, None)), server, token, trust, **own)
    click.echo(run.id)
    return followed(run) if wait else 0


def submitted(
    given: Mapping[str, Any], server: str, token: str | None, trust: str | None = None, **own: Any
) -> "SearchRun":
    """The search that the arguments of `redline.tune` ask for, submitted with what is asked of the queue."""
    asked = {name: value for name, value in given.items() if value not in (None, "", (), {}, False)}
    return client_of(server, token, trust).submit(asked.pop("target"), asked.pop("space", None), **own, **asked)


def searched(given: Mapping[str, Any], server: str, token: str | None, as_json: bool) -> int:
    """`redline tune --server`: submits, waits, and shows what came of it; the exit code."""
    run = submitted(given, server, token)
    if not as_json:
        click.echo(f"search   {run.id} on {server}")
        return followed(run)
    run.wait()
    found = {**run.look().model_dump(), **run.summary()}
    click.echo(json.dumps(found))
    return exit_codes.FAILED if found["state"] == "failed" else 0 if found["best"] else exit_codes.NOTHING_FEASIBLE


def followed(run: "SearchRun") -> int:
    """Shows what happens in a search until it ends; the exit code of what came of it."""
    try:
        for event in run.events():
            if line := told(event.kind, event.data):
                click.echo(line)
    except KeyboardInterrupt:
        click.echo(
            f"The search goes on; `redline logs {run.id} -f` shows it, `redline cancel {run.id}` ends it.", err=True
        )
        return exit_codes.INTERRUPTED
    from .results import summed_up

    return summed_up(run)


def told(kind: str, data: dict[str, Any]) -> str:
    """An event in words; empty where it is of no interest."""
    from ..results.columns import fold, number
    from . import words

    if kind == "search":
        reason = data.get("reason") or ""
        return f"{data.get('state')}{f': {fold(str(reason))}' if reason else ''}"
    if kind == "placed":
        device = data.get("device") or {}
        return f"on {fold(str(device.get('name', '')))}"
    if kind == "plan":
        valid = data.get("valid")  # of a space too large to be listed it is not known
        some = "very many" if valid is None else f"{valid:,}"
        return f"{some} valid configurations, {data.get('sampler')}, {data.get('done')} trials done"
    if kind == "started":
        return f"trial {data['trial']} begins: {fold(words.configuration(data.get('config') or {}))}"
    if kind == "finished":
        speed = number(data["throughput"], 5) if data.get("throughput") else ""
        tail = f"{speed} {data.get('unit', '')}" if speed else fold(str(data.get("reason", "")))
        return f"trial {data['trial']} {data.get('status')}: {tail}"
    if kind in ("said", "waiting"):
        return fold(str(data.get("message") or data.get("what") or ""))
    return ""
