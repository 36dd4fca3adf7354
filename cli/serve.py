"""`redline serve`: searches for a team."""

from pathlib import Path
from typing import Any

import click

from ..tuner.budget import parse_memory


@click.command(
    epilog="""\b
Examples:
  redline serve
  redline serve --data /srv/redline --devices 8 --port 8700
  redline serve --storage postgresql://redline@db/redline --no-worker --host 0.0.0.0 --certificate tls.pem
  redline serve --ray-address auto
""",
    short_help="Serve searches for a team on shared devices.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("redline-service"),
    show_default=True,
    metavar="DIR",
    help="Folder for searches and logs.",
)
@click.option("--storage", metavar="URL", help="sqlite:///FILE or postgresql://...  [default: redline.db in --data]")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8700,
    show_default=True,
    metavar="N",
    help="Port; if it is in use, the next free one.",
)
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="Of TLS, in PEM.")
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Of the certificate, where it is apart.")
@click.option(
    "--proxy",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Of a proxy in front; its X-Forwarded-* count.",
)
@click.option("--worker/--no-worker", default=True, help="Whether this host's devices join the pool.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many of them.  [default: all]")
@click.option("--ray-address", metavar="ADDRESS", help="A Ray cluster whose devices join, in place of this host's.")
@click.option("--allow-code/--no-code", default=True, help="Whether users who may submit code can.")
@click.option(
    "--workloads/--no-workloads",
    default=True,
    help="Whether that may be a workload's file, which runs as this user here.  [never with --code-user]",
)
@click.option(
    "--searches", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Searches at once."
)
@click.option(
    "--queued",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Searches queued of a user.",
)
@click.option(
    "--search-memory",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    callback=lambda context, option, value: parse_memory(value),
    help="What a searcher may take beyond what all share.",
)
@click.option(
    "--rate", type=click.FloatRange(min=1), default=50, show_default=True, metavar="N", help="Requests a second a user."
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another server has the folder or the database, and take over when it is gone.",
)
@click.option(
    "--keep-events",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="X",
    help="Events of a search that ended are kept so long.",
)
@click.option(
    "--keep-searches",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Searches that ended are deleted after so long, with their folders.  [default: never]",
)
@click.option(
    "--code-user", metavar="NAME", help="Unix user as whom code runs on this host.  [default: who starts this]"
)
@click.option("--json-logs", is_flag=True, help="Log every request, as lines of JSON.")
def serve(data: Path, **given: Any) -> None:
    """Serve searches for a team: a queue in a database, workers that join and leave, an API, pages.

    All of it may be killed at any moment and started again with the same --data: everything goes on by itself. The first
    start prints the token of the user 'admin'; `redline token` makes others.
    """
    from ..service.server import ServeOptions, exposed, serve as run

    if words := exposed(given["host"], given["certificate"]):
        click.echo(f"note: {words}", err=True)
    run(ServeOptions(data=data, **given), say=click.echo)
