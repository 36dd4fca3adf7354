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
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="TLS certificate, in PEM.")
@click.option(
    "--key", type=click.Path(path_type=Path), metavar="FILE", help="Key of the certificate, if in another file."
)
@click.option(
    "--proxy",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address of a proxy whose X-Forwarded-* headers are trusted.",
)
@click.option("--worker/--no-worker", default=True, help="Add the devices of this host to the pool.")
@click.option(
    "--devices", type=click.IntRange(min=1), metavar="N", help="Number of devices of this host.  [default: all]"
)
@click.option(
    "--ray-address", metavar="ADDRESS", help="A Ray cluster whose devices join in place of those of this host."
)
@click.option("--allow-code/--no-code", default=True, help="Accept code from users who may submit it.")
@click.option(
    "--workloads/--no-workloads",
    default=True,
    help="Accept workload files, which run as this user on this host.  [never with --code-user]",
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
    help="Queued searches of a user.",
)
@click.option(
    "--search-memory",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    callback=lambda context, option, value: parse_memory(value),
    help="Memory of a searcher beyond the memory that all share.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="Requests per second and user.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another server uses the folder or the database, and take over when it has ended.",
)
@click.option(
    "--keep-events",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="X",
    help="Days for which the events of an ended search are kept.",
)
@click.option(
    "--keep-searches",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Days after which ended searches and their folders are deleted.  [default: never]",
)
@click.option(
    "--code-user", metavar="NAME", help="Unix user that runs code on this host.  [default: the user who starts this]"
)
@click.option("--json-logs", is_flag=True, help="Log every request, as lines of JSON.")
def serve(data: Path, **given: Any) -> None:
    """Serve searches for a team: a queue in a database, workers that join and leave, an API, web pages.

    All processes may be killed at any time: started again with the same --data, they continue. The first start prints
    the token of the user 'admin'; `redline token` creates others.
    """
    from ..service.server import ServeOptions, exposed, serve as run

    if words := exposed(given["host"], given["certificate"]):
        click.echo(f"note: {words}", err=True)
    run(ServeOptions(data=data, **given), say=click.echo)
