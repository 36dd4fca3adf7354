"""A search as the server's host agent is asked to do it: in a fork that has all imports done, and ends with the server."""

import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from ..base.errors import AttemptOver
from ..runners.host import PLAIN_IMPORTS
from ..runners.job import AgentTask, Begun
from ..runners.memory import HostMemoryMeter
from ..runners.process import call_this_process
from .limits import SearcherLimits

IMPORTS = (
    "redline.service.searcher",
    "redline.service.store",
    "redline.tuner.samplers.bayes",
    "redline.tuner.samplers.random_search",
    "alembic.migration",
    "alembic.script",
    "optuna.storages",
    "scipy.stats",
)
"""What every searcher would import by itself, which takes seconds; in the agent it is done once."""
OF_MODELS = (
    *PLAIN_IMPORTS,
    "redline.estimator.facts.disk_cache",
    "redline.estimator.facts.traced",
    "redline.estimator.measuring",
    "redline.estimator.survey",
)
"""The same of those that search for a model, and not for a command of which none is named."""


def driver_of(url: str) -> tuple[str, ...]:
    """Modules by which a database is spoken to."""
    if url.startswith("sqlite"):
        return ("sqlalchemy.dialects.sqlite",)
    return ("psycopg", "sqlalchemy.dialects.postgresql.psycopg")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask(AgentTask):
    """One attempt at a search. It says by which process (`Begun`), and when it ends by itself with which code."""

    url: str
    """Of the service's database. It may hold a password, and so is on no command line."""
    data: Path
    """The server's data."""
    search: str
    """Id of the search."""
    log: Path
    """File for what it prints, which is appended to."""
    code: bool = True
    """Whether it may run a workload's file."""
    limits: SearcherLimits = field(default_factory=SearcherLimits)
    """What it may take."""

    def run(self, client: Connection) -> None:
        call_this_process(f"rl-{self.search}")
        with open(self.log, "ab", buffering=0) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        # What is killed now goes on when it is started again; there is nothing to tidy up.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_end_with, args=(client,), daemon=True, name="server").start()
        client.send(Begun(os.getpid()))
        HostMemoryMeter().limit(self.limits.memory_mib)
        code = self._searched()
        sys.stdout.flush()
        sys.stderr.flush()
        client.send(code)

    def _searched(self) -> int:
        """Searches; the exit code."""
        from .searcher import FENCED, Searcher
        from .store import Store

        try:
            store = Store.open(self.url, create=False)
            Searcher(store, self.url, self.data, self.search, code=self.code, limits=self.limits).run()
        except AttemptOver as error:
            print(error, file=sys.stderr)
            return FENCED
        except SystemExit as ended:
            print(ended, file=sys.stderr)
            return 1
        except BaseException:
            traceback.print_exc()
            return 1
        return 0


def _end_with(client: Connection) -> None:
    """Ends at once when the server has: it says nothing more, so that whatever comes is its end."""
    try:
        client.recv()
    except (EOFError, OSError):
        os._exit(128 + signal.SIGHUP)
