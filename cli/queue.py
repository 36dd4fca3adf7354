"""`redline queue`: the running and waiting searches of a server."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ..service.records import VISIBILITIES
from .server_options import PRIORITY, client_of, with_server

if TYPE_CHECKING:
    from rich.table import Table

    from ..service.api.models import SearchAnswer
    from ..service.client import Client


PIPE_WIDTH = 240
"""Columns of the table where the output is no terminal."""


@click.command(
    epilog="""\b
Examples:
  redline queue
  redline queue --all --json
  redline queue --hold 3f2a9c01d4e7 --priority 9b1c02d4e7aa 20
  redline queue --cancel 3f2a9c01d4e7
""",
)
@click.option("--all", "everything", is_flag=True, help="Include searches that have ended.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="Searches of --all."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cancel", multiple=True, metavar="ID", help="End a search; its results so far are kept.")
@click.option("--hold", multiple=True, metavar="ID", help="Start no trials of a search until it is released.")
@click.option("--release", multiple=True, metavar="ID", help="Continue a search that is held.")
@click.option("--retry", multiple=True, metavar="ID", help="Continue a search that failed or was cancelled.")
@click.option("--delete", multiple=True, metavar="ID", help="Delete a search that has ended, with its folder.")
@click.option("--priority", type=(str, PRIORITY), multiple=True, metavar="ID N", help="Change a priority.")
@click.option(
    "--show-to",
    type=(str, click.Choice(VISIBILITIES)),
    multiple=True,
    metavar="ID NAME",
    help="Change who sees a search: own, team or all.",
)
@with_server
def queue(
    server: str,
    token: str | None,
    trust: str | None,
    everything: bool,
    limit: int,
    as_json: bool,
    **changes: Any,
) -> None:
    """Show running and waiting searches with the reason for waiting, or change their state in the queue."""
    from rich.console import Console
    from rich.text import Text

    if any(changes.values()):
        with client_of(server, token, trust) as client:
            _change(client, changes)
        return
    with client_of(server, token, trust) as client:
        answer = client.queue()
        searches = _newest(client, limit) if everything else answer.searches
    if as_json:
        click.echo(json.dumps([search.model_dump() for search in searches] if everything else answer.model_dump()))
        return
    # A pipe has no width; the default of 80 would break reasons into words.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    busy = [f"{device.busy} of {device.total} x {device.name} busy" for device in answer.devices]
    console.print(Text(", ".join(busy) or "the server does not reach its Ray cluster", style="dim"))
    names = ["id", "name", "user", "state", "prio", "devices", "trials", "why"]
    console.print(_table(names, [_search(search) for search in searches]))
    if everything and len(searches) == limit:
        console.print(Text(f"the newest {limit} searches; --limit shows more", style="dim"))


def _newest(client: "Client", most: int) -> "list[SearchAnswer]":
    """Returns the newest searches, read page by page."""
    searches: list[SearchAnswer] = []
    while len(searches) < most:
        size = min(100, most - len(searches))
        page = client.searches(after=searches[-1].id if searches else None, limit=size)
        searches += page
        if len(page) < size:
            break
    return searches


def _change(client: "Client", changes: dict[str, Any]) -> None:
    """Changes searches as requested, and prints the new state of each."""
    for action in ("cancel", "hold", "release", "retry"):
        for search in changes[action]:
            run = client.search(search)
            getattr(run, action)()
            click.echo(f"{search} {'held' if action == 'hold' else run.state}")
    for search, priority in changes["priority"]:
        client.search(search).change(priority=priority)
        click.echo(f"{search} priority {priority}")
    for search, visibility in changes["show_to"]:
        client.search(search).change(visibility=visibility)
        click.echo(f"{search} is shown to {visibility}")
    for search in changes["delete"]:
        client.search(search).delete()
        click.echo(f"{search} deleted")


def _search(search: "SearchAnswer") -> list[str]:
    counts = [str(search.priority), str(search.devices), str(search.trials)]
    return [search.id, search.name, search.user, search.state, *counts, search.reason]


def _table(names: list[str], rows: list[list[str]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    from ..results.columns import fold

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold", min_width={"id": 12, "state": 9}.get(name, len(name)))
    for row in rows:
        table.add_row(*(Text(fold(cell)) for cell in row))
    return table
