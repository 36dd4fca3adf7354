"""Options for the connection to a server: address, token, certificates."""

from collections.abc import Callable
from typing import Any

import click

from ..base.errors import UsageError
from ..service.records import priority_of
from ..service.serve_options import PORT

Command = Callable[..., Any]
SERVER = f"http://127.0.0.1:{PORT}"
NO_TOKEN = "a server needs a token: --token, or REDLINE_TOKEN; `redline token new` creates one"


class _Priority(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A priority as a name or a number."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return priority_of(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


PRIORITY = _Priority()


def with_server(command: Command) -> Command:
    """Adds `--server`, `--token` and `--trust`."""
    for option in (
        click.option("--trust", metavar="FILE", help="Certificates to trust, in PEM.  [default: the system's]"),
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


def client_of(server: str, token: str | None, trust: str | None) -> Any:
    """Returns the client of a server.

    Raises:
        UsageError: no token is given.
    """
    from ..service.client import Client

    if not token:
        raise UsageError(NO_TOKEN)
    return Client(server, token=token, trust=trust)
