"""`redline results`: the results of a search on a server."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..base.errors import UsageError
from ..knobs.text import config_text
from . import exit_codes
from .server_options import client_of, with_server

if TYPE_CHECKING:
    from ..service.client import SearchRun


@click.command(
    epilog="""\b
Examples:
  redline results 3f2a9c01d4e7
  redline results 3f2a9c01d4e7 --csv trials.csv
  redline results 3f2a9c01d4e7 --to accelerate
""",
)
@click.argument("search", metavar="ID")
@click.option(
    "--csv", "table", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write trials.csv."
)
@click.option("--to", "target", metavar="NAME", help="Print the winner for a framework, as `redline export` does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@with_server
def results(
    server: str,
    token: str | None,
    trust: str | None,
    search: str,
    table: Path | None,
    target: str | None,
    as_json: bool,
) -> int:
    """Show the winner of the search ID, or the best so far. Exit codes: 0 found, 1 it failed, 3 nothing feasible."""
    if sum(map(bool, (table, target, as_json))) > 1:
        raise UsageError("--csv, --to and --json each select the output: use only one of them")
    if Path(search).is_dir():
        raise UsageError(f"'{search}' is a folder, and ID is a search of a server; `redline show {search}` lists a run")
    with client_of(server, token, trust) as client:
        run = client.search(search)
        if table is not None:
            try:
                table.write_bytes(run.table())
            except OSError as error:
                raise UsageError(f"'{table}' cannot be written: {error.strerror or error}") from None
            click.echo(f"wrote {table}")
            return _exit_code(run.look().state, run.best)
        if target is not None:
            click.echo(run.export(target), nl=False)
            return _exit_code(run.look().state, run.best)
        if as_json:
            return print_json(run)
        return print_summary(run)


def print_json(run: "SearchRun") -> int:
    """Prints a search and its results so far as a JSON object, and returns the exit code."""
    found = {**run.look().model_dump(), **run.summary()}
    click.echo(json.dumps(found))
    return _exit_code(found["state"], found["best"])


def _exit_code(state: str, best: object) -> int:
    return exit_codes.FAILED if state == "failed" else exit_codes.FOUND if best else exit_codes.NOTHING_FEASIBLE


def print_summary(run: "SearchRun") -> int:
    """Prints the results of a search so far and returns the exit code."""
    from ..results.columns import fold, speed
    from ..results.summary import Gain

    found, best = run.look(), run.best
    click.echo(f"{found.id}  {fold(found.name)}  {found.state}{f': {fold(found.reason)}' if found.reason else ''}")
    if best is None:
        click.echo(fold(f"nothing feasible so far: {run.why}" if found.state != "failed" else "it failed"))
        return _exit_code(found.state, best)
    click.echo(f"winner   trial {best.trial.number}: {speed(best.throughput, best.measurement.unit)}")
    known = run.summary()
    if (ratio := known["gain"]) is not None:
        interval = known.get("gain_interval")
        click.echo(f"gain     {Gain(ratio=ratio, half_width=interval[1] - ratio if interval else None)}")
    if known.get("failures"):
        click.echo(fold(f"trials   {known['failures']}"))
    click.echo(fold(f"         {config_text(best.config)}"))
    return _exit_code(found.state, best)
