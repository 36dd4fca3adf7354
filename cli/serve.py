"""`redline serve` and `redline token`: searches for a team, its users, their rights and their tokens."""

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import NotFound, UsageError
from ..results.columns import printable
from ..service.records import MOST_PRIORITY
from ..service.serve_options import ServeOptions
from .options import options_for

if TYPE_CHECKING:
    from ..service.store import Store


@click.command(
    epilog="""\b
Examples:
  redline serve
  redline serve --data /srv/redline --devices 8 --port 8700
  redline serve --ray-address head:6379 --slice 30m
  redline serve --storage postgresql://redline@db/redline --host 0.0.0.0 --certificate tls.pem
""",
)
@options_for(ServeOptions)
def serve(**option_values: Any) -> None:
    """Serve searches for a team: a queue in a database, searches on Ray, an API, web pages.

    Without --ray-address, Ray is started on this host. All processes may be killed at any time: started again with the same
    --data, they continue. The first start prints the token of the user 'admin'; `redline token` creates others.
    """
    options = ServeOptions(**option_values)
    from ..service.server import exposed, serve as run

    if (warning := exposed(options)) is not None:
        click.echo(f"note: {warning}", err=True)
    run(options, say=click.echo)


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


NONE = "none"
ROLES = click.Choice(["reader", "submitter", "code", "admin"])


class _Limit(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A number above 0, or `none` for no limit."""

    name = "limit"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == NONE:
            return NONE
        try:
            number = self._kind(value)
        except ValueError:
            number = self._kind(0)
        if not number > 0:
            self.fail(f"'{value}' is neither a number above 0 nor '{NONE}'", param, ctx)
        return number


def with_rights(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for the rights of a user; those that are not given are None."""
    for option in (
        click.option(
            "--priority", type=click.IntRange(0, MOST_PRIORITY), metavar="N", help="Highest priority of their searches."
        ),
        click.option(
            "--weight", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Share of the devices."
        ),
        click.option(
            "--device-hours", type=_Limit(float), metavar="X", help=f"Limit in seven days.  [a number, or '{NONE}']"
        ),
        click.option("--devices", type=_Limit(int), metavar="N", help=f"Devices at once.  [a number, or '{NONE}']"),
        click.option("--searches", type=_Limit(int), metavar="N", help=f"Searches at once.  [a number, or '{NONE}']"),
        click.option("--role", type=ROLES, help="Each includes those before it; code: also commands and workloads."),
    ):
        command = option(command)
    return command


def _rights(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the rights that options state."""
    return {name: None if value == NONE else value for name, value in options.items() if value is not None}


@click.group(
    epilog="""\b
Examples:
  redline token new ann --role submitter --devices 8 --device-hours 200
  redline token --data /srv/redline new ann --for laptop --expires 90d
  redline token change ann --role code --devices none
  redline token list
  redline token revoke redline_5c1e
""",
)
@at_database
def token() -> None:
    """Add users and tokens, change and revoke them, in the database on the server's host; the server may be running."""


@token.command()
@click.argument("user")
@click.option("--for", "name", default="", metavar="TEXT", help="Purpose of the token.")
@click.option("--expires", metavar="TIME", help="Lifetime of the token, such as 30d or 12h.")
@with_rights
@click.pass_obj
def new(url: str, user: str, name: str, expires: str | None, **options: Any) -> None:
    """Create a token for USER, who is added if unknown, as a submitter by default. The token is shown only once."""
    rights = _rights(options)
    with store_of(url, new=True) as store:
        try:
            account = store.user(user)
        except NotFound:
            account = store.add_user(user, **rights)
        else:
            if any(getattr(account, right) != value for right, value in rights.items()):
                raise UsageError(
                    f"{user} exists already, as {account.role}; `redline token change {user}` changes their rights"
                )
        token_text = store.new_token(account, name, _later(expires))
    click.echo(token_text)


@token.command()
@click.argument("user")
@with_rights
@click.pass_obj
def change(url: str, user: str, **options: Any) -> None:
    """Change the rights of USER; those that are not given stay unchanged."""
    rights = _rights(options)
    if not rights:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UsageError(f"nothing to change: give at least one of {flags}")
    _changed(url, user, rights)


@token.command()
@click.argument("user")
@click.pass_obj
def disable(url: str, user: str) -> None:
    """Reject all tokens of USER from now on; their searches continue."""
    _changed(url, user, {"disabled": True})


@token.command()
@click.argument("user")
@click.pass_obj
def enable(url: str, user: str) -> None:
    """Accept the tokens of USER again."""
    _changed(url, user, {"disabled": False})


def _changed(url: str, name: str, changes: dict[str, Any]) -> None:
    with store_of(url) as store:
        account = store.change_user(name, **changes)
    click.echo(f"{account.name} is {account.role}{', disabled' if account.disabled is not None else ''}")


@token.command()
@click.argument("begins", metavar="TOKEN")
@click.pass_obj
def revoke(url: str, begins: str) -> None:
    """Revoke a token, given by its text, its id, or the start of either."""
    with store_of(url) as store:
        revoked = store.revoke(begins)
    click.echo(f"revoked {revoked.id}")


@token.command()
@click.pass_obj
def users(url: str) -> None:
    """List users and their rights, and what they have used."""
    with store_of(url) as store:
        used_hours = {share.user: share.week_s / 3600 for share in store.shares()}
        rows = [
            [
                *(account.name, str(account.role), f"{account.weight:g}"),
                *(_limit_text(account.searches), _limit_text(account.devices)),
                f"{used_hours[account.id]:.1f} of {_limit_text(account.device_hours)}",
                "any" if account.role == "admin" else str(account.priority),
                f"disabled {day(account.disabled)}" if account.disabled is not None else "active",
            ]
            for account in store.users()
        ]
    names = ["user", "role", "weight", "searches", "devices", "device-hours in 7 days", "priority up to", "state"]
    _echo_table(names, rows)


def _limit_text(limit: float | None) -> str:
    return "any" if limit is None else f"{limit:g}"


@token.command("list")
@click.pass_obj
def list_tokens(url: str) -> None:
    """List tokens."""
    with store_of(url) as store:
        owners = {user.id: user for user in store.users()}
        rows = [
            [
                *(owners[token.user].name, str(owners[token.user].role), token.id, token.name, day(token.created)),
                "never" if token.used is None else day(token.used),
                _state(token),
            ]
            for token in store.tokens()
        ]
    _echo_table(["user", "role", "token", "for", "created", "last used", "state"], rows)


def _echo_table(names: list[str], rows: list[list[str]]) -> None:
    for cells in (names, ["---"] * len(names), *rows):
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        click.echo(printable(f"| {row} |"))


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
