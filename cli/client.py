"""`redline queue` and `redline results`: the searches of a server. The options for the connection to one."""

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import UsageError
from ..knobs.text import config_text
from ..service.records import ENDED, MOST_PRIORITY
from ..service.serve_options import PORT
from . import exit_codes

if TYPE_CHECKING:
    from ..service.api.models import SearchAnswer
    from ..service.client import Client, SearchRun

Command = Callable[..., Any]
SERVER = f"http://127.0.0.1:{PORT}"
NO_TOKEN = "a server needs a token: --token, or REDLINE_TOKEN; `redline token new` creates one"
PRIORITY = click.IntRange(-MOST_PRIORITY, MOST_PRIORITY)


def with_server(command: Command) -> Command:
    """Adds `--server` and `--token`."""
    for option in (
        click.option(
            "--token",
            envvar="REDLINE_TOKEN",
            metavar="TEXT",
            help="Token of the user.  [default: REDLINE_TOKEN]",
        ),
        click.option(
            "--server",
            envvar="REDLINE_SERVER",
            default=SERVER,
            metavar="URL",
            help=f"The server's address.  [default: REDLINE_SERVER, or {SERVER}]",
        ),
    ):
        command = option(command)
    return command


def client_of(server: str, token: str | None) -> Any:
    """Returns the client of a server, which says when it waits for one that does not answer.

    Raises:
        UsageError: no token is given.
    """
    from ..service.client import Client

    if not token:
        raise UsageError(NO_TOKEN)
    return Client(server, token=token, say=lambda sentence: click.echo(f"note: {sentence}", err=True))


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


LOOK_S = 1.0
"""Interval between requests for more output, s."""


@click.command(
    epilog="""\b
Examples:
  redline results 3f2a9c01d4e7
  redline results 3f2a9c01d4e7 --csv trials.csv
  redline results 3f2a9c01d4e7 --to accelerate
  redline results 3f2a9c01d4e7 -f
  redline results 3f2a9c01d4e7 --trial 4 -f
""",
)
@click.argument("search", metavar="ID")
@click.option(
    "--csv", "table", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write trials.csv."
)
@click.option("--to", "target", metavar="NAME", help="Print the winner for a framework, as `redline export` does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-f", "--follow", is_flag=True, help="Show the events until it ends.")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Show the output of this trial.")
@with_server
def results(
    server: str,
    token: str | None,
    search: str,
    table: Path | None,
    target: str | None,
    as_json: bool,
    follow: bool,
    trial: int | None,
) -> int:
    """Show the winner of the search ID, or the best so far. Exit codes: 0 found, 1 it failed, 3 no result (yet)."""
    shows_log = follow or (trial is not None and target is None)
    if sum(map(bool, (table, target, as_json, shows_log))) > 1:
        raise UsageError("--csv, --to, --json and the log each select the output: use only one of them")
    if Path(search).is_dir():
        raise UsageError(f"'{search}' is a folder, and ID is a search of a server; `redline show {search}` lists a run")
    with client_of(server, token) as client:
        run = client.search(search)
        if trial is not None and target is None:
            return print_log(run, trial, follow)
        if follow:
            for event in run.events():
                if line := event_text(event.kind, event.data):
                    click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {line}")
        if table is not None:
            try:
                table.write_bytes(run.table())
            except OSError as error:
                raise UsageError(f"'{table}' cannot be written: {error.strerror or error}") from None
            click.echo(f"wrote {table}")
            return _exit_code(run.look().state, run.best)
        if target is not None:
            if trial is None and run.best is None:
                return print_summary(run, err=True)
            click.echo(run.export(target, trial=trial), nl=False)
            return exit_codes.FOUND
        if as_json:
            return print_json(run)
        return print_summary(run)


def print_json(run: "SearchRun") -> int:
    """Prints a search and its results so far as a JSON object, and returns the exit code."""
    document = {**run.look().model_dump(), **run.summary()}
    click.echo(json.dumps(document))
    return _exit_code(document["state"], document["best"])


def _exit_code(state: str, best: object) -> int:
    return exit_codes.FAILED if state == "failed" else exit_codes.FOUND if best else exit_codes.NOTHING_FEASIBLE


def print_summary(run: "SearchRun", err: bool = False) -> int:
    """Prints the results of a search so far, by default to standard output, and returns the exit code."""
    from ..results.columns import fold, speed
    from ..results.summary import Gain

    search, best = run.look(), run.best
    reason = f": {fold(search.reason)}" if search.reason else ""
    click.echo(f"{search.id}  {fold(search.name)}  {search.state}{reason}", err=err)
    if best is None:
        why = "nothing feasible" if search.state in ENDED else "no result yet"
        click.echo("it failed" if search.state == "failed" else fold(f"{why}: {run.why}"), err=err)
        return _exit_code(search.state, best)
    click.echo(f"winner   trial {best.trial.number}: {speed(best.throughput, best.measurement.unit)}")
    summary = run.summary()
    if (ratio := summary["gain"]) is not None:
        interval = summary.get("gain_interval")
        click.echo(f"gain     {Gain(ratio=ratio, half_width=interval[1] - ratio if interval else None)}")
    if summary.get("failures"):
        click.echo(fold(f"trials   {summary['failures']}"))
    click.echo(fold(f"         {config_text(best.config)}"))
    return _exit_code(search.state, best)


def print_log(run: "SearchRun", trial: int, follow: bool) -> int:
    """Prints the output of a trial, with `follow` until its search ends, and returns the exit code."""
    # Pieces may end within a character.
    decoder, seen = codecs.getincrementaldecoder("utf-8")("replace"), 0
    while True:
        over = run.state in ENDED or not follow
        data = run.log(trial, seen)
        seen += len(data)
        # Control characters of an untrusted program must not reach the terminal.
        output = decoder.decode(data, final=over).replace("\r\n", "\n").replace("\r", "\n")
        click.echo("".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in output), nl=False)
        sys.stdout.flush()
        if over and not seen:
            click.echo(f"the trial {trial} has no output yet", err=True)
        if over:
            return exit_codes.FOUND if seen else exit_codes.NOTHING_FEASIBLE
        time.sleep(LOOK_S)


def event_text(kind: str, data: dict[str, Any]) -> str:
    """Returns a readable event; empty if it is not shown."""
    from ..results.columns import fold, number

    if kind == "search":
        reason = data.get("reason") or ""
        device = f" on {fold(str(data['kind']))}" if data.get("kind") else ""
        return f"{data.get('state')}{device}{f': {fold(str(reason))}' if reason else ''}"
    if kind in ("pausing", "restarting", "stopped"):
        return fold(f"{kind}: {data.get('reason')}")
    if kind == "plan":
        valid = data.get("valid")  # unknown for a space that is too large to be listed
        count = "very many" if valid is None else f"{valid:,}"
        return f"{count} valid configurations, {data.get('sampler')}, {data.get('done')} trials done"
    if kind == "started":
        return f"trial {data['trial']} starts: {fold(config_text(data.get('config') or {}))}"
    if kind == "finished":
        speed = number(data["throughput"], 5) if data.get("throughput") else ""
        tail = f"{speed} {data.get('unit', '')}" if speed else fold(str(data.get("reason", "")))
        return f"trial {data['trial']} {data.get('status')}: {tail}"
    if kind in ("said", "waiting"):
        return fold(str(data.get("message") or data.get("what") or ""))
    return ""
