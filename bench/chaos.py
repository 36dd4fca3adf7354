"""Kills whatever the service consists of, at random and under load, and counts what that loses or does twice: nothing.

    python bench/chaos.py --kills 200 --searches 50 --out bench/results/chaos.json
    python bench/chaos.py --storage postgresql://redline@localhost/redline ...

`redline serve` and some workers run on this machine; searches of a short command are submitted at once. Every few seconds
one process is killed (SIGKILL): the server with all that hangs on it, a searcher, a worker, a host agent, or a rank. Who
would start them again in life, systemd or Slurm, is this file. Counted are, and the exit code is 1 unless all are zero:

- lost: outcomes that were acknowledged and are missing or others in the ledger, and searches that do not end well;
- repeated: dry runs that were leased after their outcome was acknowledged;
- slow: kills of a server, searcher or worker after which it took longer than ten seconds until it, or what it did, went on.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path

import psutil
from redline.results import View
from redline.service.records import DryRunState, SearchState
from redline.service.store import Store

VICTIMS = ("server", "searcher", "worker", "agent", "rank")
RECOVERY_S = 10.0
"""How long it may take after a kill until what was killed goes on."""
STILL_S = 300.0
"""Without an event for so long, all of it counts as hung."""
PROGRAM = (
    "import time; time.sleep({seconds}); [print('speed:', {x} + 1, flush=True) or time.sleep(0.05) for _ in range(6)]"
)
MODULES = {"searcher": "redline.service.searcher", "agent": "redline.runners.agent"}


class Service:
    """A server and workers, each started again when it is gone."""

    def __init__(self, folder: Path, storage: str, workers: int, searches: int) -> None:
        self._folder, self.port = folder, 18700 + os.getpid() % 1000
        tool = [sys.executable, "-m", "redline.tuner.cli"]
        serving = ["--data", str(folder), "--storage", storage, "--port", str(self.port), "--no-worker"]
        self._commands = {"server": [*tool, "serve", *serving, "--searches", str(searches)]}
        self.store = Store.open(storage)
        token = self.store.new_token(self.store.add_user("chaos", "admin", allow_code=True), "bench")
        for number in range(workers):
            joining = ["--server", f"http://127.0.0.1:{self.port}", "--token", token, "--name", f"w{number}"]
            self._commands[f"worker {number}"] = [*tool, "worker", *joining, "--devices", "2"]
        self.processes: dict[str, subprocess.Popen] = {}

    def look(self) -> None:
        """Starts what is not running."""
        for name, command in self._commands.items():
            if name not in self.processes or self.processes[name].poll() is not None:
                with open(self._folder / "log", "ab") as log:
                    self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)

    def healthy(self) -> bool:
        """Whether the server answers."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=1) as answer,
        ):
            return answer.status == 200
        return False

    def victims(self, kind: str) -> list[psutil.Process]:
        """The processes of a kind that run."""
        own = [
            psutil.Process(each.pid)
            for name, each in self.processes.items()
            if each.poll() is None and name.startswith(kind)
        ]
        if kind in ("server", "worker"):
            return own
        every = [psutil.Process(each.pid) for each in self.processes.values() if each.poll() is None]
        found = []
        for child in (child for each in every for child in _children(each)):
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if (kind == "rank" and PROGRAM[:20] in " ".join(line)) or MODULES.get(kind, "?") in line:
                    found.append(child)
        return found

    def close(self) -> None:
        """Ends all of it."""
        for each in self.processes.values():
            each.terminate()
        for each in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(30)
            each.kill()
        self.store.close()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


class Recovery:
    """When what was killed goes on."""

    def __init__(self, service: Service, kind: str, search: str = "") -> None:
        self.kind, self._service, self._search = kind, service, search
        self.began = time.monotonic()
        self._attempt = service.store.search(search).attempt if search else 0
        self._leased = {}
        if kind == "worker":
            self._leased = {each.dry_run: service.store.dry_run(each.dry_run).lease for each in service.store.running()}

    def over(self) -> bool:
        """Whether the server answers; the search has another attempt; what the worker had is leased anew or ended."""
        store = self._service.store
        if self.kind == "server":
            return self._service.healthy()
        if self.kind == "searcher":
            found = store.search(self._search)
            return found.attempt > self._attempt or found.state.ended
        return not self._leased or any(
            (found := store.dry_run(number)).lease > lease or found.state is DryRunState.DONE
            for number, lease in self._leased.items()
        )


def kill_one(service: Service, random_: random.Random) -> Recovery | None:
    """Kills one process of a kind drawn at random; what is to be waited for, None where nobody could be killed."""
    kind = random_.choice(VICTIMS)
    if not (found := service.victims(kind)):
        return None
    victim = random_.choice(found)
    with contextlib.suppress(psutil.Error):
        search = victim.cmdline()[-1] if kind == "searcher" else ""
        recovery = Recovery(service, kind, search)
        victim.kill()
        return recovery
    return None


def submit(service: Service, searches: int, trials: int) -> list[str]:
    """The ids of so many searches of a command."""
    user = next(each for each in service.store.users() if each.name == "chaos")
    program = PROGRAM.replace("{seconds}", "{x % 3 / 4}")
    asked = {
        "command": {"command": f"{sys.executable} -c {shlex.quote(program)}", "metric": [r"speed: (?P<tokens_per_second>\d+)"]},
        "override": {"x": list(range(2 * trials))}, "devices": 1, "trials": trials, "patience": 0, "sampler": "random",
    }  # fmt: skip
    return [service.store.submit(user, {**asked, "seed": number}, devices=1)[0].id for number in range(searches)]


def counted(service: Service, folder: Path, storage: str, ids: list[str], trials: int) -> dict[str, list[str]]:
    """What was lost and what was run again, in words."""
    lost, repeated = [], []
    for search in ids:
        found = service.store.search(search)
        if found.state is not SearchState.DONE:
            lost.append(f"{search} is {found.state}: {found.reason[:200]}")
            continue
        kept = {each.number: each for each in View(folder / "searches" / search, storage=storage).trials()}
        if sorted(kept) != list(range(trials)) or any(each.pending for each in kept.values()):
            lost.append(f"{search} has trials {sorted(kept)}")
        for run in service.store.dry_runs(search):
            number = run.key.removeprefix("trial-")
            if run.outcome is None or not number.isdigit() or int(number) not in kept:
                continue
            trial = kept[int(number)]
            told = trial.first if trial.first is not None else trial.measured.throughput
            if told != run.outcome.get("throughput"):
                lost.append(f"{search} {run.key}: {run.outcome.get('throughput')} was answered, {told} is kept")
        ended = set()
        for event in service.store.events(search=search, limit=100_000):
            if event.kind == "dry_run":
                number = event.data["dry_run"]
                if number in ended:
                    repeated.append(f"{search} {event.data['key']} is {event.data['state']} after its outcome")
                if event.data["state"] == DryRunState.DONE:
                    ended.add(number)
    return {"lost": lost, "repeated": repeated}


def main() -> None:
    """Runs it and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--searches", type=int, default=50)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=3, help="searches at once")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="URL of a database; by default SQLite in a temporary folder")
    parser.add_argument("--out", type=Path, help="where to write the table, as JSON")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        storage = given.storage or f"sqlite:///{folder}/redline.db"
        service = Service(folder, storage, given.workers, given.at_once)
        try:
            table = chaos(service, folder, storage, given, draw)
        finally:
            service.close()
    print(json.dumps(table, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(table, indent=2) + "\n")
    sys.exit(bool(table["lost"] or table["repeated"] or table["slow"]))


def chaos(service: Service, folder: Path, storage: str, given: argparse.Namespace, draw: random.Random) -> dict:
    """Searches to their end, with kills on the way; what came of them."""
    ids, begun = submit(service, given.searches, given.trials), time.monotonic()
    kills: collections.Counter[str] = collections.Counter()
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    waiting: list[Recovery] = []
    latest, moved, next_kill = 0, begun, begun + 20.0
    while any(not service.store.search(each).state.ended for each in ids):
        service.look()
        now = time.monotonic()
        if (new := service.store.latest()) != latest:
            latest, moved = new, now
        if now - moved > STILL_S:
            break
        for each in [each for each in waiting if each.over()]:
            waiting.remove(each)
            seconds[each.kind].append(time.monotonic() - each.began)
        if kills.total() < given.kills and now >= next_kill and not waiting:
            if (killed := kill_one(service, draw)) is not None:
                kills[killed.kind] += 1
                next_kill = now + draw.expovariate(1 / given.every)
                if killed.kind in ("server", "searcher", "worker"):
                    waiting.append(killed)
        time.sleep(0.1)
    found = counted(service, folder, storage, ids, given.trials)
    slow = [f"{kind}: {each:.1f} s" for kind, many in seconds.items() for each in many if each > RECOVERY_S]
    return {
        "searches": len(ids), "trials": given.trials, "minutes": round((time.monotonic() - begun) / 60, 1),
        "kills": dict(kills), "recovery_s": {kind: _summary(many) for kind, many in seconds.items()},
        "lost": found["lost"], "repeated": found["repeated"], "slow": slow,
        "storage": storage.partition(":")[0], "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {each: metadata.version(each) for each in ("torch", "optuna", "sqlalchemy")},
    }  # fmt: skip


def _summary(many: list[float]) -> dict[str, float]:
    ordered = sorted(many)
    return {"median": round(ordered[len(ordered) // 2], 1), "worst": round(ordered[-1], 1)}


if __name__ == "__main__":
    main()
