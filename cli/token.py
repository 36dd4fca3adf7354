"""`redline token`: users and their tokens."""

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import NotFound, UsageError
from .server_options import PRIORITY

if TYPE_CHECKING:
    from ..service.store import Store


def at_database(group: Callable[[], None]) -> Callable[..., None]:
    """Adds `--data` and `--storage` to a group; its commands receive the URL of the database."""

    @click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("redline-service"),
        show_default=True,
        metavar="DIR",
        help="The server's folder.",
    )
    @click.option("--storage", metavar="URL", help="The server's database.  [default: redline.db in --data]")
    @click.pass_context
    @wraps(group)
    def reached(context: click.Context, data: Path, storage: str | None) -> None:
        context.obj = storage or f"sqlite:///{(data / 'redline.db').absolute()}"

    return reached


@click.group(
    epilog="""\b
Examples:
  redline token new ann --role submitter --running 8 --device-hours 200
  redline token new pool --role worker
  redline token --data /srv/redline new ann --for laptop --expires 90d
  redline token list
  redline token revoke redline_5c1e
""",
)
@at_database
def token() -> None:
    """Add users and tokens, and revoke them, in the database on the server's host; the server may be running."""


@token.command()
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice(["reader", "submitter", "admin", "worker"]),
    help="Role of a new user.  [default: submitter]",
)
@click.option("--for", "name", default="", metavar="TEXT", help="Purpose of the token.")
@click.option("--expires", metavar="TIME", help="Lifetime of the token, such as 30d or 12h.")
@click.option("--device-hours", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Quota of a new user.")
@click.option("--running", type=click.IntRange(min=1), metavar="N", help="Dry runs at once of a new user.")
@click.option(
    "--priority", type=PRIORITY, default="normal", metavar="N", help="Highest priority that a new user may give."
)
@click.option("--allow-code", is_flag=True, help="A new user may submit workloads and commands, which are code.")
@click.pass_obj
def new(url: str, user: str, role: str | None, name: str, expires: str | None, **rights: Any) -> None:
    """Create a token for USER, who is added if unknown. The token is shown only once."""
    with store_of(url, new=True) as store:
        try:
            account = store.user(user)
        except NotFound:
            account = store.add_user(user, role or "submitter", **rights)
        else:
            if (role is not None and role != account.role) or any(rights.values()):
                raise UsageError(
                    f"{user} exists already, as {account.role}; `redline user change {user}` changes their rights"
                )
        token_text = store.new_token(account, name, _later(expires))
        store.audit("", "token", user, {"for": name, "expires": expires})
    click.echo(token_text)


@token.command()
@click.argument("begins", metavar="TOKEN")
@click.pass_obj
def revoke(url: str, begins: str) -> None:
    """Revoke a token, given by its text, its id, or the start of either."""
    with store_of(url) as store:
        revoked = store.revoke(begins)
        store.audit("", "revoke", revoked.id)
    click.echo(f"revoked {revoked.id}")


@token.command("list")
@click.pass_obj
def listed(url: str) -> None:
    """List users and tokens."""
    from ..results.listing import write_rows

    with store_of(url) as store:
        users = {user.id: user for user in store.users()}
        rows = [
            [
                *(users[token.user].name, str(users[token.user].role), token.id, token.name, day(token.created)),
                "never" if token.used is None else day(token.used),
                _state(token),
            ]
            for token in store.tokens()
        ]
    click.echo(write_rows(["user", "role", "token", "for", "created", "last used", "state"], rows, "markdown"))


def store_of(url: str, new: bool = False) -> "Store":
    """Opens the store in a database. With `new`, a database is created in a server's folder that has none yet.

    Raises:
        UsageError: the SQLite file, or its folder, does not exist.
    """
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not file.exists():
        if not (new and file.parent.is_dir()):
            missing = f"server's database {file}" if file.parent.is_dir() else f"server's folder {file.parent}"
            raise UsageError(f"there is no {missing}: give --data, the folder of `redline serve`, or --storage")
        click.echo(
            f"note: {file} is new, for the first start of `redline serve`; a server with --storage needs --storage here",
            err=True,
        )
    from ..service.store import Store

    return Store.open(url)


def _later(expires: str | None) -> float | None:
    from ..tuner.budget import parse_duration

    seconds = parse_duration(expires, "--expires")
    return None if seconds is None else time.time() + seconds


def day(when: float) -> str:
    """Returns a time to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(when))


def _state(token: Any) -> str:
    if token.revoked is not None:
        return f"revoked {day(token.revoked)}"
    if token.expires is None:
        return "valid"
    return f"{'valid until' if token.expires > time.time() else 'expired'} {day(token.expires)}"
