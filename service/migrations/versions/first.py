"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "redline_audit",
        sa.Column("id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("user", sa.String(length=200), nullable=False),
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_audit")),
    )
    op.create_table(
        "redline_users",
        sa.Column("id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("device_hours", sa.Float(), nullable=True),
        sa.Column("running", sa.Integer(), nullable=True),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("allow_code", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_users")),
        sa.UniqueConstraint("name", name=op.f("uq_redline_users_name")),
    )
    op.create_table(
        "redline_searches",
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("user", NUMBER, nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=200), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("heartbeat", sa.Float(), nullable=True),
        sa.Column("best", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reuse", sa.Boolean(), nullable=False),
        sa.Column("finished", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["user"], ["redline_users.id"], name=op.f("fk_redline_searches_user")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_searches")),
    )
    op.create_index(op.f("ix_redline_searches_created"), "redline_searches", ["created"], unique=False)
    op.create_index(op.f("ix_redline_searches_state"), "redline_searches", ["state"], unique=False)
    op.create_index("uq_redline_searches_user_key", "redline_searches", ["user", "key"], unique=True)
    op.create_table(
        "redline_tokens",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("user", NUMBER, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["user"], ["redline_users.id"], name=op.f("fk_redline_tokens_user")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_tokens")),
    )
    op.create_index(op.f("ix_redline_tokens_user"), "redline_tokens", ["user"], unique=False)
    op.create_table(
        "redline_workers",
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("user", NUMBER, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("host", sa.String(length=200), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("software", sa.JSON(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.Column("left", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["user"], ["redline_users.id"], name=op.f("fk_redline_workers_user")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_workers")),
    )
    op.create_index(op.f("ix_redline_workers_left"), "redline_workers", ["left"], unique=False)
    op.create_table(
        "redline_dry_runs",
        sa.Column("id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("search", sa.String(length=12), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("lease", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=12), nullable=True),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("outcome", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["search"], ["redline_searches.id"], name=op.f("fk_redline_dry_runs_search")),
        sa.ForeignKeyConstraint(["worker"], ["redline_workers.id"], name=op.f("fk_redline_dry_runs_worker")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_dry_runs")),
    )
    op.create_index(op.f("ix_redline_dry_runs_ended"), "redline_dry_runs", ["ended"], unique=False)
    op.create_index(op.f("ix_redline_dry_runs_state"), "redline_dry_runs", ["state"], unique=False)
    op.create_index(op.f("ix_redline_dry_runs_worker"), "redline_dry_runs", ["worker"], unique=False)
    op.create_index("uq_redline_dry_runs_search_key", "redline_dry_runs", ["search", "key"], unique=True)
    op.create_table(
        "redline_events",
        sa.Column("id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("search", sa.String(length=12), nullable=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["search"], ["redline_searches.id"], name=op.f("fk_redline_events_search")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_redline_events_search_id", "redline_events", ["search", "id"], unique=False)
    op.create_table(
        "redline_measured",
        sa.Column("id", NUMBER, autoincrement=True, nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("config_id", sa.String(length=64), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("measurement", sa.JSON(), nullable=False),
        sa.Column("search", sa.String(length=12), nullable=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["search"], ["redline_searches.id"], name=op.f("fk_redline_measured_search")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redline_measured")),
    )
    op.create_index(op.f("ix_redline_measured_fingerprint"), "redline_measured", ["fingerprint"], unique=False)
