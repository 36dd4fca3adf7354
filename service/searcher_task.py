"""A search as a task of the server's host agent: it runs in a fork that has all imports done and ends with the server."""

import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import AttemptOver
from ..runners.host import PLAIN_IMPORTS
from ..runners.job import AgentTask, Begun
from ..runners.memory import HostMemoryMeter
from ..runners.process import call_this_process
from ..runners.protocol import Channel, Received
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
"""Modules that every searcher needs. Importing them takes seconds, so the agent does it once."""
OF_MODELS = (
    *PLAIN_IMPORTS,
    "redline.estimator.facts.disk_cache",
    "redline.estimator.facts.traced",
    "redline.estimator.measuring",
    "redline.estimator.survey",
)
"""Modules that searchers need in addition if the search has a model."""


def driver_of(url: str) -> tuple[str, ...]:
    """Returns the modules of the database's driver."""
    if url.startswith("sqlite"):
        return ("sqlalchemy.dialects.sqlite",)
    return ("psycopg", "sqlalchemy.dialects.postgresql.psycopg")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask(AgentTask):
    """One attempt at a search. Sends its process id (`Begun`), and replies with its exit code if it ends on its own."""

    url: str
    """URL of the service's database. It may contain a password, so it never appears on a command line."""
    data: Path
    """The server's data folder."""
    search: str
    log: Path
    """File to which its output is appended."""
    code: bool = True
    """True if it may run a workload file."""
    limits: SearcherLimits = field(default_factory=SearcherLimits)

    def run(self, call: Received) -> int:
        call_this_process(f"rl-{self.search}")
        with open(self.log, "ab", buffering=0) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        # No cleanup on a signal: a killed search continues when it is restarted.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_end_with, args=(call.channel,), daemon=True, name="server").start()
        call.note(Begun(os.getpid()))
        HostMemoryMeter().limit(self.limits.memory_mib)
        code = self._searched()
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def _searched(self) -> int:
        """Runs the search and returns the exit code."""
        from .searcher import FENCED, Searcher
        from .store import Store

        try:
            store = Store.open(self.url, create=False)
            Searcher(store, self.url, self.data, self.search, code=self.code, limits=self.limits).run()
        except AttemptOver as error:
            print(error, file=sys.stderr)
            return FENCED
        except SystemExit as stop:
            print(stop, file=sys.stderr)
            return 1
        except BaseException:
            traceback.print_exc()
            return 1
        return 0


def _end_with(server: Channel) -> None:
    """Ends this process when the server ends. The server sends nothing more, so any event on the channel is its end."""
    try:
        server.receive()
    except EOFError:
        os._exit(128 + signal.SIGHUP)
