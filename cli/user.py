"""`redline user`: rights and actions of users."""

from typing import Any

import click

from .server_options import PRIORITY
from .token import at_database, day, store_of

NONE = "none"
ROLES = ("reader", "submitter", "admin")


@click.group(
    epilog="""\b
Examples:
  redline user list
  redline user change ann --role admin --device-hours 500 --team vision
  redline user change ann --running none --priority 5
  redline user disable bob
  redline user audit --user ann
""",
)
@at_database
def user() -> None:
    """Change or disable users, and list their actions, in the database on the server's host; the server may be running."""


@user.command("list")
@click.pass_obj
def listed(url: str) -> None:
    """List users, their rights, and the last use of a token of each."""
    from ..results.listing import write_rows

    with store_of(url) as store:
        hours = {name: seconds / 3600 for name, seconds in store.usage().items()}
        used: dict[int, float] = {}
        for token in store.tokens():
            used[token.user] = max(used.get(token.user, 0.0), token.used or 0.0)
        rows = [
            [
                *(account.name, str(account.role), account.team, f"{account.weight:g}"),
                f"{hours.get(account.id, 0.0):.1f} of {'any' if account.device_hours is None else f'{account.device_hours:g}'}",
                "any" if account.running is None else str(account.running),
                "any" if account.role == "admin" else str(account.priority),
                "yes" if account.allow_code else "no",
                day(used[account.id]) if used.get(account.id) else "never",
                f"disabled {day(account.disabled)}" if account.disabled is not None else "active",
            ]
            for account in store.users()
        ]
    names = [
        "user",
        "role",
        "team",
        "weight",
        "device-hours in 30 days",
        "dry runs at once",
        "priority up to",
        "code",
        "last seen",
        "state",
    ]
    click.echo(write_rows(names, rows, "markdown"))


@user.command()
@click.argument("name", metavar="USER")
@click.option("--role", type=click.Choice(ROLES))
@click.option("--device-hours", metavar="X", help=f"Quota in 30 days, or '{NONE}'.")
@click.option("--running", metavar="N", help=f"Dry runs at once, or '{NONE}'.")
@click.option("--weight", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Share of the devices.")
@click.option("--priority", type=PRIORITY, metavar="N", help="Highest priority of their searches.")
@click.option("--allow-code/--no-code", default=None, help="Allow workloads and commands.")
@click.option("--team", metavar="TEXT", help="Team that sees searches shown to it.")
@click.pass_obj
def change(url: str, name: str, device_hours: str | None, running: str | None, **new_rights: Any) -> None:
    """Change the rights of USER; options that are not given stay unchanged."""
    changes = {field: value for field, value in new_rights.items() if value is not None}
    if device_hours is not None:
        changes["device_hours"] = None if device_hours == NONE else _number("--device-hours", device_hours, float)
    if running is not None:
        changes["running"] = None if running == NONE else _number("--running", running, int)
    _changed(url, name, "change user", changes)


@user.command()
@click.argument("name", metavar="USER")
@click.pass_obj
def disable(url: str, name: str) -> None:
    """Reject all tokens of USER from now on; their searches continue."""
    _changed(url, name, "disable", {"disabled": True})


@user.command()
@click.argument("name", metavar="USER")
@click.pass_obj
def enable(url: str, name: str) -> None:
    """Accept the tokens of USER again."""
    _changed(url, name, "enable", {"disabled": False})


@user.command()
@click.option("--user", "user_name", metavar="NAME", help="Only actions of this user.")
@click.option(
    "--last",
    "limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Number of entries, the latest ones.",
)
@click.pass_obj
def audit(url: str, user_name: str | None, limit: int) -> None:
    """List actions and their users: submissions, cancellations, joins, logins, changes."""
    import json

    from ..results.columns import fold
    from ..results.listing import write_rows

    with store_of(url) as store:
        entries = store.audited(limit, user=user_name)
    rows = [
        [day(entry.time), entry.user or "(on the host)", entry.action, entry.subject, json.dumps(entry.detail)]
        for entry in entries
    ]
    rows = [[fold(cell) for cell in row] for row in rows]
    click.echo(write_rows(["when", "who", "what", "to", "how"], rows, "markdown"))


def _changed(url: str, name: str, action: str, changes: dict[str, Any]) -> None:
    with store_of(url) as store:
        account = store.change_user(name, **changes)
        store.audit("", action, name, changes)
    click.echo(f"{account.name} is {account.role}{', disabled' if account.disabled is not None else ''}")


def _number(option: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise click.BadParameter(f"'{value}' is neither a number nor '{NONE}'", param_hint=option) from None
