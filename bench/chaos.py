"""Kills processes of the service at random, and counts lost and repeated trials and searches that hang.

    python bench/chaos.py --out bench/results/service-chaos-sqlite.json
    python bench/chaos.py --storage postgresql://redline@localhost/redline --out bench/results/service-chaos-postgres.json
    python bench/chaos.py --nodes 2 --kills 60 --out bench/results/service-chaos-cluster.json
    python bench/chaos.py --kills 0 --write docs/service.md     # the table of what is in bench/results

`redline serve` runs on this machine with a Ray of its own, or with `--nodes` on a Ray cluster that it joins; searches of a
short command are submitted to it. Every few seconds one process is killed (SIGKILL): the server, the process of a search, the
rank or the host agent of a trial, the process that keeps the server's Ray, and of Ray the head (GCS), a node (raylet) or the
process of a search that uses it. Or the database fails: all connections of Postgres are cut, or one of its processes is killed
so that it restarts from disk; for SQLite another process locks the file for three seconds. This program restarts the server and
the cluster, as systemd or KubeRay would. Searches are added until enough processes were killed. The exit code is 1 unless these
counts are zero:

- lost: finished trials that are missing or different in the end, and searches that do not end well;
- repeated: trials that were reported as finished twice, and programs that ran to their end again after their trial was
  reported as finished, before the leaders were measured again;
- hung: true if nothing happens for five minutes.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from common import RESULTS, machine, markdown, parser, put, read_json, write_json
from redline.base.errors import StorageUnavailable
from redline.results import View
from redline.service.records import SearchState
from redline.service.store import Store

PROGRAM = (
    "import time; time.sleep({seconds}); [print('speed:', {x} + 1, flush=True) or time.sleep(0.05) for _ in range(6)]; "
    "open('{calls}', 'a').write(f'{search} {x} {{time.time()}}\\n')"
)
"""The program of a trial."""
LOCKED_S = 3.0
"""Seconds for which another process locks SQLite's file."""
STILL_S = 300.0
"""Seconds without an event after which the service counts as hung."""
RECOVERY_S = 120.0
"""Longest time from a kill to the next one, s; otherwise it follows when a trial has started or ended."""
RARE = {"Ray head": 0.25, "Ray node": 0.25, "Ray keeper": 0.25}
"""Frequency of a kind relative to the others, as Ray itself restarts slowly."""
CPUS = 4
"""Cores that the server's Ray reports, or each node of the cluster."""
CLUSTER = """
import os, sys, time
from ray.cluster_utils import Cluster
port, nodes, cpus = map(int, sys.argv[1:])
head = {"gcs_server_port": port, "num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(nodes):
    cluster.add_node(num_cpus=cpus)
print(cluster.address, flush=True)
while cluster.head_node.remaining_processes_alive():
    for node in [node for node in cluster.worker_nodes if not node.remaining_processes_alive()]:
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=cpus)
    time.sleep(0.2)
os._exit(1)
"""


def main() -> None:
    """Runs the benchmark and writes its results."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--searches", type=int, default=8, help="searches that are queued or run")
    options.add_argument("--trials", type=int, default=5, help="of a search")
    options.add_argument("--at-once", type=int, default=3, help="searches at once")
    options.add_argument("--every", type=float, default=5.0, help="average seconds from a recovery to the next kill")
    options.add_argument("--kinds", nargs="+", metavar="NAME", help="kinds of processes to kill; by default all")
    options.add_argument("--nodes", type=int, default=0, help="join a Ray cluster of a head and this many nodes")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--storage", help="URL of a database; by default SQLite in a temporary folder")
    options.add_argument("--out", type=Path, help="where to write the results, as JSON")
    options.add_argument("--write", type=Path, help="a page into which the table of all results is written")
    arguments = options.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # its child processes end with it
    bad = False
    if arguments.kills:
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
            results = Chaos(Path(folder), arguments).run()
        print(json.dumps(results, indent=2))
        bad = bool(results["lost"] or results["repeated"] or results["hung"])
        write_json(arguments.out, results)
    if arguments.write is not None:
        every = [read_json(file) for file in sorted(RESULTS.glob("service-chaos-*.json"))]
        put(arguments.write, "chaos", table(every))
    sys.exit(bad)


class Service:
    """A server, and the cluster that it joins, each restarted when it has ended.

    Args:
        folder: of the server's data.
        storage: URL of the database.
        nodes: of the cluster; 0 for the server's own Ray.
        at_once: searches at once.
    """

    def __init__(self, folder: Path, storage: str, nodes: int, at_once: int) -> None:
        self._folder, self._storage, self._nodes = folder, storage, nodes
        serving = ["--data", str(folder), "--storage", storage, "--port", str(_free_port()), "--searches", str(at_once)]
        self._commands = {"server": [sys.executable, "-m", "redline.cli", "serve", *serving]}
        if nodes:
            port = _free_port()
            self._commands["cluster"] = [sys.executable, "-c", CLUSTER, str(port), str(nodes), str(CPUS)]
            self._commands["server"] += ["--ray-address", f"{_address()}:{port}"]
        else:
            self._commands["server"] += ["--devices", str(CPUS)]
        self.store = Store.open(storage)
        self.user = self.store.add_user("chaos", "admin")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}

    @property
    def kinds(self) -> list[str]:
        """The kinds of processes that can be killed."""
        kinds = ["server", "searcher", "rank", "host agent", "Ray client", "Ray head", "database"]
        return [*kinds, "Ray node" if self._nodes else "Ray keeper"]

    def look(self) -> None:
        """Starts processes that are not running, at most once a second, as systemd would."""
        for name, command in self._commands.items():
            running = name in self._processes and self._processes[name].poll() is None
            if running or time.monotonic() - self._started.get(name, 0.0) < 1.0:
                continue
            self._started[name] = time.monotonic()
            with open(self._folder / f"{name}.txt", "ab") as log:
                self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self, kind: str, draw: random.Random) -> bool:
        """Kills a process of a kind. Returns False without such a process."""
        if kind == "database":
            self._fail_database(draw)
            return True
        if victims := self._victims(kind):
            with contextlib.suppress(psutil.Error):
                draw.choice(victims).kill()
                return True
        return False

    def _victims(self, kind: str) -> list[psutil.Process]:
        if kind == "server":
            process = self._processes["server"]
            return [psutil.Process(process.pid)] if process.poll() is None else []
        mark = {
            "searcher": "rl-",
            "rank": PROGRAM[:20],
            "host agent": "redline.runners.host.agent",
            "Ray client": "redline.runners.place.ray_driver",
            "Ray keeper": "redline.service.local_ray",
            "Ray head": "gcs_server",
            "Ray node": "raylet/raylet",
        }[kind]
        victims = [process for process in self._descendants() if mark in _command_text(process)]
        return victims[1:] if kind == "Ray node" else victims  # the first one belongs to the head

    def _descendants(self) -> list[psutil.Process]:
        """Returns the processes of this service: those whose environment names its folder."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CHAOS_FOLDER") == str(self._folder):
                    processes.append(process)
        return sorted(processes, key=lambda process: process.create_time())

    def _fail_database(self, draw: random.Random) -> None:
        if self._storage.startswith("sqlite"):
            threading.Thread(target=_lock, args=(self._storage.removeprefix("sqlite:///"),), daemon=True).start()
            return
        import psycopg

        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with psycopg.connect(self._storage, autocommit=True) as connection:
            if draw.random() < 0.5:
                connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
            else:  # Postgres then ends all its other processes and restarts from disk
                pids = [pid for (pid,) in connection.execute(f"SELECT pid {others}")]
                os.kill(draw.choice(pids), signal.SIGKILL)

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes["server"].wait(30)
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.store.close()


class Chaos:
    """Runs searches and kills processes meanwhile.

    Args:
        folder: for the service.
        arguments: of the command line.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        os.environ["CHAOS_FOLDER"] = str(folder)  # which all its processes inherit
        self._folder, self._arguments, self._draw = folder, arguments, random.Random(arguments.seed)
        storage = arguments.storage or f"sqlite:///{folder}/redline.db"
        self._service = Service(folder, storage, arguments.nodes, arguments.at_once)
        self._kinds = [kind for kind in self._service.kinds if not arguments.kinds or kind in arguments.kinds]
        self._ids: list[str] = []
        self._kills: collections.Counter[str] = collections.Counter()
        self._quiet_s: dict[str, list[float]] = collections.defaultdict(list)
        """Time from each kill to the next start or end of a trial, s, by kind."""

    def run(self) -> dict[str, Any]:
        """Returns the results when all searches have ended, or nothing happens any more."""
        begin = time.monotonic()
        try:
            hung = self._run()
            results = self._count()
        except BaseException:
            print((self._folder / "server.txt").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            self._service.close()
        database = "Postgres" if (self._arguments.storage or "").startswith("postgres") else "SQLite"
        return {
            "service": f"{database}{', a cluster' if self._arguments.nodes else ''}",
            "kills": self._kills.total(),
            "searches": len(self._ids),
            "trials": self._arguments.trials,
            "minutes": round((time.monotonic() - begin) / 60, 1),
            "by_kind": {
                kind: {"kills": count, "quiet_s": round(statistics.median(self._quiet_s[kind] or [0.0]), 1)}
                for kind, count in sorted(self._kills.items())
            },
            **results,
            "hung": hung,
            "machine": machine("sqlalchemy"),
        }

    def _run(self) -> bool:
        store, latest = self._service.store, 0
        moved, next_kill, last_kind, killed_at = time.monotonic(), float("inf"), "", 0.0
        while True:
            self._service.look()
            now = time.monotonic()
            with contextlib.suppress(StorageUnavailable):
                events = store.events(latest)
                if events:
                    latest, moved = events[-1].id, now
                if any(event.kind in ("started", "finished") for event in events):
                    if not self._kills:
                        next_kill = now
                    if last_kind:
                        next_kill = now + self._draw.expovariate(1 / self._arguments.every)
                        self._quiet_s[last_kind].append(now - killed_at)
                        last_kind = ""
                if now - moved > STILL_S:
                    return True
                if now >= next_kill and self._kills.total() < self._arguments.kills:
                    kind = self._draw.choices(self._kinds, [RARE.get(kind, 1.0) for kind in self._kinds])[0]
                    if self._service.kill(kind, self._draw):
                        self._kills[kind] += 1
                        last_kind, killed_at, next_kill = kind, now, now + RECOVERY_S
                        print(f"{self._kills.total():4} {kind}", flush=True)
                open_searches = [*store.searches(state="running"), *store.searches(state="queued")]
                if self._kills.total() < self._arguments.kills:
                    for _ in range(self._arguments.searches - len(open_searches)):
                        self._submit()
                elif not open_searches:
                    return False
            time.sleep(0.1)

    def _submit(self) -> None:
        trials, number = self._arguments.trials, len(self._ids)
        values = {"{seconds}": "{x % 4 + 0.5}", "{calls}": str(self._folder / "calls"), "{search}": str(number)}
        program = PROGRAM
        for name, value in values.items():
            program = program.replace(name, value)
        request = {
            "command": {
                "command": f"{sys.executable} -c {shlex.quote(program)}",
                "metric": [r"speed: (?P<tokens_per_second>\d+)"],
            },
            "override": {"x": list(range(2 * trials))}, "devices": 1, "trials": trials, "patience": 0,
            "sampler": "random", "seed": number,
        }  # fmt: skip
        self._ids.append(self._service.store.submit(self._service.user, request, devices=1)[0].id)

    def _count(self) -> dict[str, list[str]]:
        """Returns descriptions of lost and of repeated work."""
        calls = collections.defaultdict(list)
        for line in (self._folder / "calls").read_text().splitlines():
            search, x, ended = line.split()
            calls[int(search), int(x)].append(float(ended))
        lost, repeated = [], []
        for number, search in enumerate(self._ids):
            record = self._service.store.search(search)
            if record.state is not SearchState.DONE:
                lost.append(f"{search} is {record.state}: {record.reason[:200]}")
                continue
            trials = {trial.number: trial for trial in View(self._folder / "searches" / search).trials()}
            if sorted(trials) != list(range(self._arguments.trials)) or any(t.pending for t in trials.values()):
                lost.append(f"{search} has trials {sorted(trials)}")
            finished: dict[int, float] = {}
            for event in self._service.store.events(search=search, limit=100_000):
                if event.kind != "finished":
                    continue
                trial = event.data["trial"]
                if trial in finished:
                    repeated.append(f"{search} trial {trial} was reported twice")
                finished[trial] = event.time
                first = trials[trial].first if trials[trial].first is not None else trials[trial].measured.throughput
                if first != event.data["throughput"]:
                    lost.append(
                        f"{search} trial {trial}: {event.data['throughput']} was reported, {first} is in the folder"
                    )
            # Afterwards the leaders are measured again, also after a kill.
            last = max(finished.values(), default=0.0)
            for trial, when in finished.items():
                again = [ended for ended in calls[number, trials[trial].config["x"]] if when + 1.0 < ended < last]
                if again:
                    repeated.append(f"{search} trial {trial} ran {len(again)} times after it was reported")
        return {"lost": lost, "repeated": repeated}


def _lock(path: str) -> None:
    """Locks a SQLite file for a while."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute("BEGIN IMMEDIATE")
    time.sleep(LOCKED_S)
    connection.execute("ROLLBACK")
    connection.close()


def _command_text(process: psutil.Process) -> str:
    """Returns the text that identifies a process: its name, which it may have changed, and its command line."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


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


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results of several runs as a table in Markdown."""
    rows = [[name, *(result[name] for result in results)] for name in ("kills", "searches", "minutes")]
    rows += [[f"trials {name}", *(len(result[name]) for result in results)] for name in ("lost", "repeated")]
    rows.append(["hung", *("yes" if result["hung"] else "no" for result in results)])
    for kind in sorted({kind for result in results for kind in result["by_kind"]}):
        cells = [result["by_kind"].get(kind) for result in results]
        rows.append([kind, *("" if cell is None else f"{cell['kills']}: {cell['quiet_s']} s" for cell in cells)])
    note = "For each kind of process the kills, and the median time until a trial started or ended again"
    machines = "; ".join(dict.fromkeys(result["machine"] for result in results))
    return f"{markdown(['', *(result['service'] for result in results)], rows)}\n\n{note}; on {machines}"


if __name__ == "__main__":
    main()
