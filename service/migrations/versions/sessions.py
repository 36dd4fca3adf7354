"""Adds sessions of pages and a user's highest priority; gives the server's own worker the role of a worker."""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2_totals"


def upgrade() -> None:
    """Creates the table and changes the role."""
    op.create_table(
        "redline_sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=16), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["redline_tokens.id"], name=op.f("fk_redline_sessions_token")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_redline_sessions")),
    )
    op.add_column("redline_users", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE redline_users SET role = 'worker' WHERE name = 'embedded' AND role = 'submitter'")
