"""The history of the tables, as Alembic migrations, one step per file."""
