"""The store: its parts, and how it is opened."""

import time
from collections.abc import Callable
from typing import Self

from .connection import PATIENCE_S, Database, migrate, write_ahead
from .demand import Demand
from .dry_runs import DryRuns, Knowledge
from .events import Events
from .people import People
from .searches import Searches
from .workers import Workers


class Store(People, Searches, DryRuns, Demand, Workers, Events, Knowledge):
    """Everything the service knows. Threads may share one; every process opens its own."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """The store in a database.

        Args:
            url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.
            create: whether to make its tables, or bring those of an earlier version up to date. Without, they must be
                there as they are.
            clock: tells the time.
            patience_s: how long a database that is away is tried again before `StorageUnavailable`, s.

        Raises:
            UsageError: the URL is of another kind of database.
            StorageAhead: a later version of redline has written it.
            StorageUnavailable: it cannot be used, or has no tables and `create` is false.
            MissingDependency: its driver is not installed.
        """
        database = Database(url, patience_s=patience_s)
        try:
            if create:
                write_ahead(database)
            migrate(database, change=create)
        except BaseException:
            database.close()
            raise
        return cls(database, clock)

    def close(self) -> None:
        """Closes its connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
