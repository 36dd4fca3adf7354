"""The service's tables. `migrations/` creates them; a test checks that both agree.

Their names have a prefix because a Postgres database may have tables of other programs.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
"""Naming rules of constraints, so that a migration can refer to them."""
METADATA = MetaData(naming_convention=NAMES)
VERSIONS = "redline_version"
"""Table with the number of the applied migration."""

# SQLite autoincrements INTEGER columns only.
_NUMBER = BigInteger().with_variant(Integer, "sqlite")


def _number() -> Column[int]:
    return Column("id", _NUMBER, primary_key=True, autoincrement=True)


users = Table(
    "redline_users",
    METADATA,
    _number(),
    Column("name", String(200), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("searches", Integer),
    Column("devices", Integer),
    Column("device_hours", Float),
    Column("weight", Float, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("disabled", Float),
)

tokens = Table(
    "redline_tokens",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("user", ForeignKey("redline_users.id"), nullable=False, index=True),
    Column("digest", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
    Column("used", Float),
    # The token that the session of a page was opened with; NULL for tokens of users.
    Column("opened_with", ForeignKey("redline_tokens.id")),
)

searches = Table(
    "redline_searches",
    METADATA,
    Column("id", String(12), primary_key=True),
    Column("user", ForeignKey("redline_users.id"), nullable=False),
    Column("key", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("request", JSON, nullable=False),
    Column("state", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("devices", Integer, nullable=False),
    Column("concurrency", Integer),
    Column("device", String(200), nullable=False),
    Column("kind", String(200), nullable=False),
    Column("uses", Integer, nullable=False),
    Column("created", Float, nullable=False, index=True),
    Column("queued", Float, nullable=False),
    Column("started", Float),
    Column("began", Float),
    Column("ended", Float),
    Column("attempt", Integer, nullable=False),
    Column("used_s", Float, nullable=False),
    Column("pid", Integer),
    Column("pid_started", Float),
    Column("read", Integer, nullable=False),
    Column("best", JSON(none_as_null=True)),
    # Lists show the count without opening the folder of each search.
    Column("trials", Integer, nullable=False),
    Index("uq_redline_searches_user_key", "user", "key", unique=True),
    Index("ix_redline_searches_state_created", "state", "created"),
    Index("ix_redline_searches_user_created", "user", "created"),
    # Few searches have devices, among many that have ended.
    Index("ix_redline_searches_uses", "uses"),
)

usage = Table(
    "redline_usage",
    METADATA,
    # Device-seconds by day (UTC, since 1970).
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("user", ForeignKey("redline_users.id"), primary_key=True),
    Column("device_seconds", Float, nullable=False),
)

events = Table(
    "redline_events",
    METADATA,
    _number(),
    Column("search", ForeignKey("redline_searches.id")),
    Column("time", Float, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("data", JSON, nullable=False),
    Index("ix_redline_events_search_id", "search", "id"),
    sqlite_autoincrement=True,
)
