"""Options for the connection to a server, and for priorities."""

from collections.abc import Callable
from typing import Any

import click

from ..base.errors import UsageError
from ..service.records import MOST_PRIORITY
from ..service.serve_options import PORT

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
