"""Adds running totals, a search's kind of device, holds, visibility, teams, and when tokens were used."""

import sqlalchemy as sa
from alembic import op

revision = "2_totals"
down_revision = "1"

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DAY_S = 86400


def upgrade() -> None:
    """Adds the columns and tables, and fills them from existing rows."""
    op.add_column("redline_users", sa.Column("team", sa.String(length=200), nullable=False, server_default=""))
    op.add_column("redline_users", sa.Column("disabled", sa.Float(), nullable=True))
    op.add_column("redline_tokens", sa.Column("used", sa.Float(), nullable=True))
    for column in (
        sa.Column("trials", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("kind", sa.String(length=200), nullable=False, server_default=""),
        sa.Column("simulated", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("held", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("visibility", sa.String(length=10), nullable=False, server_default="all"),
    ):
        op.add_column("redline_searches", column)
    op.drop_index(op.f("ix_redline_searches_state"), "redline_searches")
    op.create_index("ix_redline_searches_state_created", "redline_searches", ["state", "created"], unique=False)
    op.create_index("ix_redline_searches_user_created", "redline_searches", ["user", "created"], unique=False)
    op.create_table(
        "redline_usage",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("user", NUMBER, nullable=False),
        sa.Column("device_seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["user"], ["redline_users.id"], name=op.f("fk_redline_usage_user")),
        sa.PrimaryKeyConstraint("day", "user", name=op.f("pk_redline_usage")),
    )
    _fill()


def _fill() -> None:
    searches = sa.table(
        "redline_searches",
        *(sa.column(name) for name in ("id", "user", "device", "kind", "trials", "finished")),
        sa.column("simulated", sa.Boolean),
        sa.column("request", sa.JSON),
    )
    runs = sa.table(
        "redline_dry_runs",
        *(sa.column(name) for name in ("search", "key", "state", "devices", "started", "ended", "worker")),
    )
    workers = sa.table("redline_workers", sa.column("id"), sa.column("device", sa.JSON))
    day = sa.cast(runs.c.ended / DAY_S, sa.Integer)
    if op.get_bind().dialect.name == "postgresql":  # where a cast rounds
        day = sa.cast(sa.func.floor(runs.c.ended / DAY_S), sa.Integer)
    had = sa.func.sum(runs.c.devices * (runs.c.ended - runs.c.started))
    ended = runs.c.started.is_not(None) & runs.c.ended.is_not(None)
    totals = sa.select(searches.c.user, day, had).join(searches, searches.c.id == runs.c.search).where(ended)
    usage = sa.table("redline_usage", sa.column("user"), sa.column("day"), sa.column("device_seconds"))
    op.execute(usage.insert().from_select(["user", "day", "device_seconds"], totals.group_by(searches.c.user, day)))
    # Simulated searches have no dry runs, and old searches have no events any more.
    events = sa.table("redline_events", sa.column("search"), sa.column("kind"))
    of_a_trial = runs.c.key.like("trial-%") & (runs.c.state == "done")
    run = sa.select(sa.func.count()).where(runs.c.search == searches.c.id, of_a_trial).scalar_subquery()
    events_count = (
        sa.select(sa.func.count())
        .where(events.c.search == searches.c.id, events.c.kind == "finished")
        .scalar_subquery()
    )
    counted = sa.case((events_count > run, events_count), else_=run)
    # The comparison is NULL for a request without a runner.
    simulated = sa.case((searches.c.request["runner"].as_string() == "simulate", sa.true()), else_=sa.false())
    op.execute(searches.update().values(trials=counted, simulated=simulated))
    started = (
        sa.select(runs.c.search, sa.func.min(runs.c.worker).label("worker")).where(runs.c.worker.is_not(None))
    ).group_by(runs.c.search)
    for search, worker in op.get_bind().execute(started).all():
        device = op.get_bind().execute(sa.select(workers.c.device).where(workers.c.id == worker)).scalar() or {}
        op.execute(searches.update().where(searches.c.id == search).values(kind=str(device.get("name", ""))))
