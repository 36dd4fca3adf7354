"""The service's tables. `migrations/` creates them; a test checks that both agree.

Their names have a prefix because Optuna's tables (`studies`, `trials`, ...) are in the same database.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
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
    Column("device_hours", Float),
    Column("running", Integer),
    Column("weight", Float, nullable=False),
    Column("allow_code", Boolean, nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("created", Float, nullable=False),
    Column("team", String(200), nullable=False, server_default=""),
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
)

sessions = Table(
    "redline_sessions",
    METADATA,
    Column("digest", String(64), primary_key=True),
    Column("token", ForeignKey("redline_tokens.id"), nullable=False),
    Column("expires", Float, nullable=False),
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
    Column("device", String(200), nullable=False),
    Column("created", Float, nullable=False, index=True),
    Column("started", Float),
    Column("ended", Float),
    Column("attempt", Integer, nullable=False),
    Column("best", JSON(none_as_null=True)),
    Column("reuse", Boolean, nullable=False),
    # Total time of its ended dry runs, updated as they end, since scheduling needs the mean often.
    Column("finished", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    # Lists show the count without opening the folder of each search.
    Column("trials", Integer, nullable=False, server_default="0"),
    Column("kind", String(200), nullable=False, server_default=""),
    Column("simulated", Boolean, nullable=False, server_default=false()),
    Column("held", Boolean, nullable=False, server_default=false()),
    Column("visibility", String(10), nullable=False, server_default="all"),
    Index("uq_redline_searches_user_key", "user", "key", unique=True),
    Index("ix_redline_searches_state_created", "state", "created"),
    Index("ix_redline_searches_user_created", "user", "created"),
)

workers = Table(
    "redline_workers",
    METADATA,
    Column("id", String(12), primary_key=True),
    Column("user", ForeignKey("redline_users.id"), nullable=False),
    Column("name", String(200), nullable=False),
    Column("host", String(200), nullable=False),
    Column("device", JSON, nullable=False),
    Column("devices", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("software", JSON, nullable=False),
    Column("seen", Float, nullable=False),
    Column("left", Float, index=True),
)

dry_runs = Table(
    "redline_dry_runs",
    METADATA,
    _number(),
    Column("search", ForeignKey("redline_searches.id"), nullable=False),
    Column("key", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("devices", Integer, nullable=False),
    Column("state", String(20), nullable=False, index=True),
    Column("lease", Integer, nullable=False),
    Column("worker", ForeignKey("redline_workers.id"), index=True),
    Column("until", Float),
    Column("outcome", JSON(none_as_null=True)),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float, index=True),
    Column("attempts", Integer, nullable=False),
    Index("uq_redline_dry_runs_search_key", "search", "key", unique=True),
)

usage = Table(
    "redline_usage",
    METADATA,
    # Device-seconds by the day (UTC, since 1970) on which dry runs ended: the sum is compared with quotas.
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

audit = Table(
    "redline_audit",
    METADATA,
    _number(),
    Column("time", Float, nullable=False),
    Column("user", String(200), nullable=False),
    Column("action", String(80), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("detail", JSON, nullable=False),
)

measured = Table(
    "redline_measured",
    METADATA,
    _number(),
    Column("fingerprint", String(64), nullable=False, index=True),
    Column("config_id", String(64), nullable=False),
    Column("config", JSON, nullable=False),
    Column("measurement", JSON, nullable=False),
    Column("search", ForeignKey("redline_searches.id")),
    Column("time", Float, nullable=False),
)
