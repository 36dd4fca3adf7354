"""How commands reach a server: its address and a token, by option or from the environment."""

from collections.abc import Callable
from typing import Any

import click

from ..base.errors import UsageError
from ..service.records import priority_of

Command = Callable[..., Any]
NO_TOKEN = "a server needs a token: --token, or REDLINE_TOKEN; `redline token new` makes one"


class _Priority(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A priority by its name or its number."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return priority_of(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


PRIORITY = _Priority()


def reached(command: Command) -> Command:
    """Adds `--server`, `--token` and `--trust`."""
    for option in (
        click.option("--trust", metavar="FILE", help="Certificates to trust, in PEM.  [default: the system's]"),
        click.option(
            "--token",
            envvar="REDLINE_TOKEN",
            metavar="TEXT",
            help="Who one is.  [default: REDLINE_TOKEN]",
        ),
        click.option(
            "--server",
            envvar="REDLINE_SERVER",
            default="http://127.0.0.1:8700",
            metavar="URL",
            help="The server's address.  [default: REDLINE_SERVER, or http://127.0.0.1:8700]",
        ),
    ):
        command = option(command)
    return command


def client_of(server: str, token: str | None, trust: str | None) -> Any:
    """The client of a server.

    Raises:
        UsageError: there is no token.
    """
    from ..service.client import Client

    if not token:
        raise UsageError(NO_TOKEN)
    return Client(server, token=token, trust=trust)
