"""The service for bench/chaos.py: its processes, their kinds, and the detection of their recovery."""

import contextlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from redline.service.records import DryRunState
from redline.service.store import Store

PROGRAM = (
    "import time; time.sleep({seconds}); [print('speed:', {x} + 1, flush=True) or time.sleep(0.05) for _ in range(6)]"
)
"""The program of a dry run."""
HELD_S = 3.0
"""Seconds for which another process locks SQLite's file."""
AGENT = "redline.runners.agent"
CPUS, NODES = 2, 2
"""Cores that each node of Ray reports, and the number of nodes besides the head."""
CLUSTER = """
import os, sys, time
from ray.cluster_utils import Cluster
here, (port, nodes, cpus) = sys.argv[1], map(int, sys.argv[2:])
head = {"gcs_server_port": port, "node_ip_address": here, "num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(nodes):
    cluster.add_node(num_cpus=cpus, node_ip_address=here)
while cluster.head_node.remaining_processes_alive():
    for node in [each for each in cluster.worker_nodes if not each.remaining_processes_alive()]:
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=cpus, node_ip_address=here)
    time.sleep(0.2)
os._exit(1)
"""


@dataclass
class Recovery:
    """A killed process and the recovery of its work."""

    kind: str
    """Kind of the process."""
    over: Callable[[], bool]
    """Returns True if the work continues."""
    began: float = field(default_factory=time.monotonic)
    """Time of the kill, on the monotonic clock."""


class Service:
    """A server, workers and Ray, each restarted when it has ended.

    Args:
        folder: folder of the server's data.
        storage: URL of the database.
        workers: number of workers; with Ray one, which has the whole cluster.
        searches: number of concurrent searches.
        ray: True if dry runs run on a Ray cluster.
    """

    def __init__(self, folder: Path, storage: str, *, workers: int, searches: int, ray: bool) -> None:
        self._folder, self._storage, self.port = folder, storage, _free_port()
        self.ray = ray
        self._ray_port, self._ray_folder = _free_port(), tempfile.mkdtemp(prefix="rl")  # a short name, for sockets
        tool = [sys.executable, "-m", "redline.cli"]
        serving = ["--data", str(folder), "--storage", storage, "--port", str(self.port), "--no-worker"]
        self._commands: dict[str, list[str]] = {}
        if ray:
            numbers = [str(each) for each in (self._ray_port, NODES, CPUS)]
            self._commands["ray"] = [sys.executable, "-c", CLUSTER, _address(), *numbers]
        self._commands["server"] = [*tool, "serve", *serving, "--searches", str(searches)]
        self.store = Store.open(storage)
        token = self.store.new_token(self.store.add_user("chaos", "admin", allow_code=True), "bench")
        for number in range(1 if ray else workers):
            joining = ["--server", f"http://127.0.0.1:{self.port}", "--token", token, "--name", f"w{number}"]
            where = ["--runner", "ray", "--ray-address", f"{_address()}:{self._ray_port}"] if ray else []
            devices = NODES * CPUS if ray else 2
            self._commands[f"w{number}"] = [*tool, "worker", *joining, *where, "--devices", str(devices)]
        self.processes: dict[str, subprocess.Popen] = {}
        self._started: dict[str, float] = {}
        self._of_ray: list[psutil.Process] = []
        self._locking: threading.Thread | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of processes that can be killed."""
        known = ["server", "searcher", "searchers' agent", "worker", "host agent", "rank", "database"]
        return known + ["Ray node", "Ray head"] * self.ray

    def look(self) -> None:
        """Starts processes that are not running, at most once per interval."""
        for name, command in self._commands.items():
            running = name in self.processes and self.processes[name].poll() is None
            if running and name == "ray":
                self._of_ray = self._below("ray")
            pause = 1.0 if name in ("ray", "server") else 3.0  # as systemd would
            if running or time.monotonic() - self._started.get(name, 0.0) < pause:
                continue
            if name == "ray":
                _kill(self._of_ray)
            self._started[name] = time.monotonic()
            # On a busy machine its agents start more slowly than it expects.
            more = {"TMPDIR": self._ray_folder, "RAY_agent_register_timeout_ms": "120000"} if name == "ray" else {}
            with open(self._folder / "log", "ab") as log:
                self.processes[name] = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    cwd=self._folder,
                    env={**os.environ, **more},
                )

    def ready(self) -> bool:
        """Returns True if the server reports that it is ready."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=1) as answer,
        ):
            return answer.status == 200
        return False

    def inject(self, kind: str, draw: random.Random) -> Recovery | None:
        """Kills a process of a kind and returns the recovery to wait for; None without such a process."""
        with contextlib.suppress(psutil.Error):
            if kind == "database":
                return self._restart_database(draw)
            found = self._victims(kind)
            if not found:
                return None
            victim = draw.choice(found)
            recovery = Recovery(kind, self._goes_on(kind, victim))
            victim.kill()
            return recovery
        return None

    def _below(self, name: str) -> list[psutil.Process]:
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            return []
        with contextlib.suppress(psutil.Error):
            return psutil.Process(process.pid).children(recursive=True)
        return []

    def _runs(self, name: str) -> list[psutil.Process]:
        """Returns the processes that execute dry runs for a worker: its descendants, or those of Ray."""
        return self._below("ray" if self.ray else name)

    def _victims(self, kind: str) -> list[psutil.Process]:
        workers = [name for name in self._commands if name.startswith("w")]
        if kind in ("server", "worker"):
            names = workers if kind == "worker" else ["server"]
            return [psutil.Process(self.processes[each].pid) for each in names if self.processes[each].poll() is None]
        if kind == "searcher":
            return [each for each in self._below("server") if _words(each).startswith("rl-")]
        if kind == "searchers' agent":
            server = self.processes["server"].pid
            return [each for each in self._below("server") if AGENT in _words(each) and each.ppid() == server]
        if kind == "host agent":
            return [each for name in workers for each in self._runs(name) if _is_agent(each)]
        if kind == "rank":
            return self._ranks()
        wanted = "gcs_server" if kind == "Ray head" else "raylet/raylet"
        found = [each for each in self._below("ray") if wanted in _words(each)]
        return found if kind == "Ray head" else found[1:]  # the first one belongs to the head

    def _ranks(self) -> list[psutil.Process]:
        return [
            each
            for name in self._commands
            if name != "server"
            for each in self._below(name)
            if PROGRAM[:24] in _words(each)
        ]

    def _goes_on(self, kind: str, victim: psutil.Process) -> Callable[[], bool]:
        """Returns a function that detects the recovery of the process killed next."""
        store = self.store
        if kind in ("server", "searchers' agent", "searcher"):
            searches = store.searches(state="running", limit=10_000)
            if kind == "searcher":
                searches = [each for each in searches if each.id in _words(victim)]
            attempts = {each.id: each.attempt for each in searches}
            return lambda: self.ready() and all(self._taken_up(*each) for each in attempts.items())
        before = {each.pid for each in self._ranks()}
        if kind == "worker":
            name = next(each for each, process in self.processes.items() if process.pid == victim.pid)
            known = {each.id for each in store.workers() if each.name == name}
            leases = {
                each.dry_run: store.dry_run(each.dry_run).lease for each in store.running() if each.worker in known
            }
            return lambda: (
                any(each.name == name and each.id not in known for each in store.workers())
                and all(self._moved(*each) for each in leases.items())
            )
        leases = {each.dry_run: store.dry_run(each.dry_run).lease for each in store.running()}

        def goes_on() -> bool:
            if {each.pid for each in self._ranks()} - before:
                return True
            return kind in ("host agent", "rank") and all(self._moved(*each) for each in leases.items())

        return goes_on

    def _taken_up(self, search: str, attempt: int) -> bool:
        found = self.store.search(search)
        return found.attempt > attempt or found.state.ended

    def _moved(self, dry_run: int, lease: int) -> bool:
        found = self.store.dry_run(dry_run)
        return found.lease > lease or found.state in (DryRunState.DONE, DryRunState.WITHDRAWN)

    def _restart_database(self, draw: random.Random) -> Recovery:
        if self._storage.startswith("sqlite"):
            recovery = Recovery("database", lambda: not locking.is_alive() and self.ready())
            locking = threading.Thread(
                target=_lock, args=(self._storage.removeprefix("sqlite:///"), recovery), daemon=True
            )
            locking.start()
            return recovery
        import psycopg

        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with psycopg.connect(self._storage, autocommit=True) as connection:
            if draw.random() < 0.5:
                connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
            else:  # Postgres then ends all its other processes and restarts from disk
                pids = [each for (each,) in connection.execute(f"SELECT pid {others}")]
                os.kill(draw.choice(pids), signal.SIGKILL)
        return Recovery("database", self.ready)

    def close(self) -> None:
        """Ends all processes."""
        every = [each for name in self.processes for each in self._below(name)]
        for name, process in self.processes.items():
            if name != "ray":
                process.terminate()
        for name, process in self.processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1 if name == "ray" else 30)
            process.kill()
            process.wait()
        _kill([*every, *self._of_ray])
        shutil.rmtree(self._ray_folder, ignore_errors=True)
        self.store.close()


def _lock(path: str, recovery: Recovery) -> None:
    """Locks a SQLite file for a while; the recovery starts at its release."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute("BEGIN IMMEDIATE")
    time.sleep(HELD_S)
    connection.execute("ROLLBACK")
    connection.close()
    recovery.began = time.monotonic()


def _words(process: psutil.Process) -> str:
    """Returns the text that identifies a process: its name, which forks may have changed, and its command line."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


def _is_agent(process: psutil.Process) -> bool:
    """Returns True if it is a host agent and not a fork of one."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return AGENT in _words(process) and parent is not None and AGENT not in _words(parent)
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.Error):
            each.kill()


def _address() -> str:
    """Returns the address of this machine that Ray uses, also in place of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # this sends nothing
        return str(probe.getsockname()[0])


def _free_port() -> int:
    """Returns a port outside the range of outgoing connections."""
    for port in random.Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no port is free")
