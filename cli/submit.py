"""`redline submit`: submission of a search to a server."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..base.option import options_of as declared
from ..models.request import ModelRequest, SpaceRequest
from ..runners.command.command import Command
from ..service.records import UNDECIDED
from ..service.request import OF_A_COMMAND, TRAVELLING
from ..tuner.request.options import RunRequest, SearchRequest
from . import exit_codes
from .client import PRIORITY, client_of, event_text, print_summary, with_server
from .options import command_of, options_of, request_of

if TYPE_CHECKING:
    from ..service.client import SearchRun

SECTIONS = (ModelRequest, SpaceRequest, SearchRequest, RunRequest, Command)
ONLY_HERE = {field.name for section in SECTIONS for field, _ in declared(section)} - {*TRAVELLING, *OF_A_COMMAND}
"""Options of `redline tune` that a server does not take."""
HELP = {
    "devices": "Devices of one trial.  [default: 1]",
    "hardware": "Hardware to assume for the estimate: a name in the table.",
}
DECIDED_S = 2.0
"""Longest wait for the reason why a search waits, s."""
OF_THE_QUEUE = ("name", "priority", "device", "key")


@click.command(
    epilog="""\b
Examples:
  redline submit gpt2-tiny --wait
  redline submit llama2-7b --devices 8 --global-batch 512 --trials 30 --priority 5
  redline submit path/to/config.json --device h100 --time 2h
  redline submit --workload train.py:workload
""",
)
@options_of(*SECTIONS, without=ONLY_HERE, help=HELP)
@click.option(
    "--command-file", metavar="FILE", help="A YAML file with --command and further fields; see `redline tune -h`."
)
@click.option("--name", default="", metavar="TEXT", help="Name of the search.  [default: the model's name]")
@click.option(
    "--priority",
    type=PRIORITY,
    default=0,
    show_default=True,
    metavar="N",
    help="Higher goes first, from -100 to 100.",
)
@click.option("--device", default="", metavar="NAME", help="Kind of device, such as h100 or cpu.  [default: any]")
@click.option("--key", metavar="TEXT", help="Key of the submission; submitting it again returns the same search.")
@click.option("--wait", is_flag=True, help="Show its events until it ends.")
@with_server
def submit(server: str, token: str | None, wait: bool, command_file: str | None, **options: Any) -> int:
    """Submit a search of MODEL to a server, with the options of `redline tune` that a server takes. Prints its id.

    The contents of a config.json, a space or a workload file are sent along.
    """
    queue_options = {name: options.pop(name) for name in OF_THE_QUEUE}
    run = submitted(request_of(options, command_of(options, command_file)), server, token, **queue_options)
    click.echo(run.id)
    if reason := waits_for(run):
        click.echo(f"note: {reason}", err=True)
    return followed(run) if wait else 0


def waits_for(run: "SearchRun") -> str:
    """Returns why a search that was just submitted waits; empty if it does not, or the server has not decided yet."""
    until = time.monotonic() + DECIDED_S
    while time.monotonic() < until:
        look = run.look()
        if look.state != "queued":
            return ""
        if look.reason != UNDECIDED:
            return look.reason
        time.sleep(0.1)
    return ""


def submitted(request_values: Mapping[str, Any], server: str, token: str | None, **queue_options: Any) -> "SearchRun":
    """Submits the search that the arguments of `redline.tune` describe, with the options of the queue."""
    set_values = {
        name: value for name, value in request_values.items() if value is not False and value not in (None, "", (), {})
    }
    target, space = set_values.pop("target"), set_values.pop("space", None)
    return client_of(server, token).submit(target, space, **queue_options, **set_values)


def followed(run: "SearchRun") -> int:
    """Prints the events of a search until it ends, then its results; returns the exit code."""
    try:
        for event in run.events():
            if line := event_text(event.kind, event.data):
                click.echo(line)
    except KeyboardInterrupt:
        click.echo(
            f"The search continues; `redline results {run.id} -f` shows it, `redline queue --cancel {run.id}` ends it.",
            err=True,
        )
        return exit_codes.INTERRUPTED
    return print_summary(run)
