"""Brings a database's tables to the version of this code, and refuses one that is ahead of it."""

from pathlib import Path

from sqlalchemy import Connection, text

from ...base.errors import StorageAhead, StorageUnavailable
from ..tables import VERSIONS
from .connection import Database

SCRIPTS = Path(__file__).parents[1] / "migrations"
_MIGRATION_LOCK = 0x7265646C696E66
"""Postgres: whoever migrates holds this lock; SQLite has one writer anyhow."""


def migrate(database: Database, *, change: bool) -> None:
    """Has the tables be as this code knows them.

    Args:
        database: where they are.
        change: whether they may be made and changed.

    Raises:
        StorageAhead: a later version has written them.
        StorageUnavailable: they are not there, or of an earlier version, and may not be changed.
    """
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    known, head = {each.revision for each in scripts.walk_revisions()}, scripts.get_current_head()
    found = database.read(_version)
    if found is not None and found not in known:
        raise StorageAhead(
            f"{database.words} is of version {found}, written by a later redline: this one knows versions up to {head}; "
            "install the later one, or give another --storage"
        )
    if found == head:
        return
    if not change:
        what = (
            "has no tables of redline's" if found is None else f"is of version {found}, and this redline needs {head}"
        )
        raise StorageUnavailable(f"{database.words} {what}; start `redline serve` on it first")

    def upgrade(connection: Connection) -> None:
        from alembic import command

        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        config.attributes |= {"connection": connection, "version_table": VERSIONS}
        command.upgrade(config, "head")

    database.write(upgrade)


def _version(connection: Connection) -> str | None:
    """The version of a database's tables; None where it has none."""
    from alembic.migration import MigrationContext

    return MigrationContext.configure(connection, opts={"version_table": VERSIONS}).get_current_revision()
