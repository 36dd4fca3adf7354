"""`redline cancel`: end searches on a server."""

import click

from .server_options import client_of, with_server


@click.command(
    epilog="""\b
Examples:
  redline cancel 3f2a9c01d4e7
""",
)
@click.argument("searches", metavar="ID...", nargs=-1, required=True)
@with_server
def cancel(server: str, token: str | None, trust: str | None, searches: tuple[str, ...]) -> None:
    """End the searches ID: no further trial starts, and the results so far are kept."""
    with client_of(server, token, trust) as client:
        for each in searches:
            run = client.search(each)
            run.cancel()
            click.echo(f"{each} {run.state}")
