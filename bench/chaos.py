"""Kills processes of the service at random under load, and counts lost and repeated work.

    python bench/chaos.py --out bench/results/service-chaos-sqlite.json
    python bench/chaos.py --storage postgresql://redline@localhost/redline --out bench/results/service-chaos-postgres.json
    python bench/chaos.py --ray --kills 60 --searches 15 --out bench/results/service-chaos-ray.json
    python bench/chaos.py --kills 0 --write docs/service.md     # the table of what is in bench/results

`redline serve` and some workers run on this machine, with `--ray` on a local Ray cluster of several nodes, where a dry
run takes two devices; searches of a short command are submitted at the same time. Every few seconds one process is
killed (SIGKILL): the server with all its child processes, a searcher, the agent from which searchers are forked, a
worker, a host agent, a rank, or of Ray a node or the head. Or the database fails: all connections of Postgres are cut,
or one of its processes is killed so that it restarts from disk; for SQLite another process locks the file for three
seconds. This program restarts servers, workers and Ray, as systemd, Slurm or KubeRay do in production. Searches are
added until enough processes were killed. The exit code is 1 unless these counts are zero:

- lost: acknowledged outcomes that are missing or different in the ledger, and searches that do not end well;
- repeated: dry runs that were leased after their outcome was acknowledged;
- slow: kills after which the process, or its work, needed more than ten seconds to continue; for Ray's own processes one
  minute, the time of a restart of Ray itself.
"""

import argparse
import collections
import json
import os
import platform
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from chaos_service import PROGRAM, Recovery, Service
from pages import put
from redline.base.errors import StorageUnavailable
from redline.results import View
from redline.service.records import DryRunState, SearchState

RECOVERY_S, RAYS_OWN_S = 10.0, 60.0
"""Allowed time from a kill until the work of the process continues."""
RARE = {"Ray head": 0.25, "Ray node": 0.5}
"""Frequency of a kind relative to the others, as Ray itself restarts slowly."""
STILL_S = 300.0
"""Seconds without an event after which the service counts as hung."""
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--searches", type=int, default=50)
    parser.add_argument("--trials", type=int, default=5, help="of a search")
    parser.add_argument("--workers", type=int, default=2, help="of two devices each")
    parser.add_argument("--at-once", type=int, default=4, help="searches at once")
    parser.add_argument("--every", type=float, default=1.0, help="average seconds from a recovery to the next kill")
    parser.add_argument("--kinds", nargs="+", metavar="NAME", help="kinds of processes to kill; by default all")
    parser.add_argument("--ray", action="store_true", help="run dry runs on a local Ray cluster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="URL of a database; by default SQLite in a temporary folder")
    parser.add_argument("--out", type=Path, help="where to write the results, as JSON")
    parser.add_argument("--write", type=Path, help="a page into which the table of all results is written")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # its child processes end with it
    found = kill_processes(given) if given.kills else {"lost": [], "repeated": [], "slow": []}
    if given.kills:
        print(json.dumps(found, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    if given.write is not None:
        found = [json.loads(each.read_text()) for each in sorted(RESULTS.glob("service-chaos-*.json"))]
        put(given.write, "chaos", table([each for each in found if "searches" in each]))
    sys.exit(bool(found["lost"] or found["repeated"] or found["slow"]))


def kill_processes(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of searches during which processes are killed."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        storage = given.storage or f"sqlite:///{folder}/redline.db"
        service = Service(folder, storage, workers=given.workers, searches=given.at_once, ray=given.ray)
        chaos = Chaos(service, given)
        try:
            chaos.run()
            found = counted(service, folder, storage, chaos.ids, given.trials)
        except BaseException:
            print((folder / "log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            service.close()
        return {**chaos.results(), **found}


class Chaos:
    """Runs searches to their end and kills processes meanwhile.

    Args:
        service: the service whose processes are killed.
        given: the command line.
    """

    def __init__(self, service: Service, given: argparse.Namespace) -> None:
        self.service, self._given, self._draw = service, given, random.Random(given.seed)
        self._kinds = [each for each in service.kinds if not given.kinds or each in given.kinds]
        self.ids: list[str] = []
        for _ in range(given.searches):
            self.ids.append(self._submitted())
        self._begun = time.monotonic()
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)
        self._waiting: Recovery | None = None
        self._kills = 0
        self._minutes = 0.0

    def _submitted(self) -> str:
        """Submits a search and returns its id."""
        store, trials = self.service.store, self._given.trials
        user = next(each for each in store.users() if each.name == "chaos")
        number = len(self.ids)
        program = PROGRAM.replace("{seconds}", "{x % 4 + 0.5}")
        words = f"{sys.executable} -c {shlex.quote(program)}"
        asked = {
            "command": {"command": words, "metric": [r"speed: (?P<tokens_per_second>\d+)"]},
            "override": {"x": list(range(2 * trials))}, "devices": 2 if self.service.ray else 1, "trials": trials,
            "patience": 0, "sampler": "random", "seed": number,
        }  # fmt: skip
        return store.submit(user, asked, devices=asked["devices"])[0].id

    def run(self) -> None:
        """Returns when all searches have ended, or nothing happens any more."""
        latest, moved, next_kill = 0, time.monotonic(), float("inf")
        while True:
            self.service.look()
            now = time.monotonic()
            try:
                if (new := self.service.store.latest()) != latest:
                    latest, moved = new, now
                if now - moved > STILL_S:
                    break
                if next_kill == float("inf") and self.service.store.running():
                    next_kill = now  # it has started to work
                if self._waiting is not None and self._waiting.over():
                    self._recovered(self._waiting)
                    next_kill = time.monotonic() + self._draw.expovariate(1 / self._given.every)
                if self._waiting is None and now >= next_kill and self._kills < self._given.kills:
                    self._kill()
                if self._ended():
                    break
            except StorageUnavailable as error:
                print(f"{error}", flush=True)
            time.sleep(0.05)
        self._minutes = (time.monotonic() - self._begun) / 60

    def _ended(self) -> bool:
        """Returns True if all searches have ended and all kills are done; adds a search if kills are left."""
        store = self.service.store
        if any(store.searches(state=state, limit=1) for state in ("running", "queued")) or self._waiting is not None:
            return False
        if self._kills < self._given.kills:
            self.ids.append(self._submitted())
            return False
        return True

    def _kill(self) -> None:
        weights = [RARE.get(each, 1.0) for each in self._kinds]
        kind = self._draw.choices(self._kinds, weights)[0]
        self._waiting = self.service.inject(kind, self._draw)
        self._kills += self._waiting is not None

    def _recovered(self, waiting: Recovery) -> None:
        took = time.monotonic() - waiting.began
        self._seconds[waiting.kind].append(took)
        self._waiting = None
        print(f"{self._kills:4} {waiting.kind}: {took:.1f} s", flush=True)

    def results(self) -> dict[str, Any]:
        """Returns the results."""
        waits = [] if self._waiting is None else [f"{self._waiting.kind}: never"]
        slow = [
            f"{kind}: {each:.1f} s" for kind, many in self._seconds.items() for each in many if each > allowed(kind)
        ]
        database = "Postgres" if (self._given.storage or "").startswith("postgres") else "SQLite"
        return {
            "where": f"{database}{', Ray' * self.service.ray}",
            "searches": len(self.ids),
            "trials": self._given.trials,
            "minutes": round(self._minutes, 1),
            "kills": self._kills,
            "recovery_s": {
                kind: {"kills": len(many), "median": round(statistics.median(many), 1), "worst": round(max(many), 1)}
                for kind, many in sorted(self._seconds.items())
            },
            "slow": slow + waits,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {each: metadata.version(each) for each in ("torch", "optuna", "sqlalchemy", "ray")},
        }


def allowed(kind: str) -> float:
    """Returns the allowed time of a recovery, s."""
    return RAYS_OWN_S if kind.startswith("Ray") else RECOVERY_S


def counted(service: Service, folder: Path, storage: str, ids: list[str], trials: int) -> dict[str, list[str]]:
    """Returns descriptions of lost and of repeated work."""
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
            measured = trial.first if trial.first is not None else trial.measured.throughput
            if measured != run.outcome.get("throughput"):
                lost.append(f"{search} {run.key}: {run.outcome.get('throughput')} was answered, {measured} is kept")
            if "were lost while it ran" in run.outcome.get("reason", ""):
                lost.append(f"{search} {run.key}: {run.outcome['reason']}")
        finished = set()
        for event in service.store.events(search=search, limit=100_000):
            if event.kind == "dry_run":
                number = event.data["dry_run"]
                if number in finished:
                    repeated.append(f"{search} {event.data['key']} is {event.data['state']} after its outcome")
                if event.data["state"] == DryRunState.DONE:
                    finished.add(number)
    return {"lost": lost, "repeated": repeated}


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results of several runs as a table in Markdown."""
    names = [each["where"] for each in results]
    kinds = dict.fromkeys(kind for each in results for kind in each["recovery_s"])
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for what in ("kills", "searches", "minutes"):
        lines.append(f"| {what} | {' | '.join(str(each[what]) for each in results)} |")
    for what, words in (("lost", "results lost"), ("repeated", "dry runs repeated"), ("slow", "slow recoveries")):
        lines.append(f"| {words} | {' | '.join(str(len(each[what])) for each in results)} |")
    for kind in sorted(kinds):
        cells = []
        for each in results:
            found = each["recovery_s"].get(kind)
            cells.append(f"{found['kills']}: {found['median']:.1f} s, {found['worst']:.1f} s" if found else "")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    machine = ", ".join(dict.fromkeys(each["machine"] for each in results))
    return "\n".join(
        [*lines, "", f"For each kind of process the number of kills, and the median and worst recovery; on {machine}."]
    )


if __name__ == "__main__":
    main()
