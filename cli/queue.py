"""`redline queue`: the running and waiting searches of a server."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .server_options import PRIORITY, client_of, with_server

if TYPE_CHECKING:
    from ..service.api.models import SearchAnswer
    from ..service.client import Client


WIDEST = {"name": 24, "user": 14}
"""Widths at which cells are cut, so that a row fits into 80 columns."""


@click.command(
    epilog="""\b
Examples:
  redline queue
  redline queue --all --json
  redline queue --priority 9b1c02d4e7aa 20
  redline queue --cancel 3f2a9c01d4e7
""",
)
@click.option("--all", "everything", is_flag=True, help="Include searches that have ended.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="Searches of --all."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cancel", multiple=True, metavar="ID", help="End a search; its results so far are kept.")
@click.option("--retry", multiple=True, metavar="ID", help="Continue a search that failed or was cancelled.")
@click.option("--delete", multiple=True, metavar="ID", help="Delete a search that has ended, with its folder.")
@click.option("--priority", type=(str, PRIORITY), multiple=True, metavar="ID N", help="Change a priority.")
@with_server
def queue(
    server: str,
    token: str | None,
    everything: bool,
    limit: int,
    as_json: bool,
    **changes: Any,
) -> None:
    """Show running and waiting searches with the reason for waiting, or change their state in the queue."""
    if any(changes.values()):
        with client_of(server, token) as client:
            _change(client, changes)
        return
    with client_of(server, token) as client:
        answer = client.queue()
        searches = _newest(client, limit) if everything else answer.searches
    if as_json:
        click.echo(json.dumps([search.model_dump() for search in searches] if everything else answer.model_dump()))
        return
    busy = [f"{device.busy} of {device.total} x {device.name} busy" for device in answer.devices]
    click.echo("\n".join(busy) or "the server does not reach its Ray cluster")
    for line in _table(searches):
        click.echo(line)
    if everything and len(searches) == limit:
        click.echo(f"the newest {limit} searches; --limit shows more")


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
    for action in ("cancel", "retry"):
        for search in changes[action]:
            run = client.search(search)
            getattr(run, action)()
            click.echo(f"{search} {run.state}")
    for search, priority in changes["priority"]:
        client.search(search).change(priority=priority)
        click.echo(f"{search} priority {priority}")
    for search in changes["delete"]:
        client.search(search).delete()
        click.echo(f"{search} deleted")


def _table(searches: "list[SearchAnswer]") -> Iterator[str]:
    """Yields a line for each search, and one below it for the reason why it waits or has ended."""
    from ..results.columns import fold

    names = ["id", "name", "user", "state", "prio", "devices", "trials"]
    fields = ["id", "name", "user", "state", "priority", "devices", "trials"]
    rows = [[getattr(search, field) for field in fields] for search in searches]
    cells = [[_cut(fold(str(cell)), WIDEST.get(name)) for name, cell in zip(names, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    for row, reason in zip([names, *cells], ["", *(search.reason for search in searches)]):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        if reason:
            yield f"    {fold(reason)}".rstrip()


def _cut(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else f"{text[: most - 3]}..."
