"""Kills processes of a search at random, and counts lost and repeated work, orphans and hangs.

    python bench/chaos_local.py --kills 200 --out bench/results/chaos-local.json

Studies of short calls run on this machine in turn: with the local runner, on a Ray of their own, and on a Ray cluster
of one node that they join. Every few seconds one of their processes is killed (SIGKILL): the driver, a host agent, the
supervisor or rank of a trial, and of Ray the process that uses it or its guard, the raylet, the head (GCS) or the
worker with the agent of a host. A killed driver is restarted with resume. The raylet and the head of a cluster that was
joined are not restarted: the driver then has to end by itself within two minutes with its results, and is resumed on
another cluster. The exit code is 1 unless these counts are zero:

- lost: results that had been written and are later missing or different, and trials without a result at the end;
- repeated: calls that started after their result had been written;
- orphaned: processes and temporary folders left after a driver has ended, or at the next start;
- hung: drivers without progress for two minutes, or that did not end within two minutes after losing their only node;
- unnamed: drivers that ended with another exit code than 1, or without a sentence about Ray, after losing their cluster.
"""

import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
from common import machine, parser, write_json
from redline.base.errors import RedlineError
from redline.results import View

STUDY = """
import os, pathlib, sys, time
import redline as rl

folder, runner, trials = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
space = rl.Space()
space.integer("x", 0, trials - 1)

def fn(config):
    with open(folder / "calls", "a") as file:
        file.write(f"{config['x']} {time.time()}\\n")
    time.sleep(0.5 + config["x"] % 3)
    return float(config["x"])

out = folder / "run"
try:
    rl.tune(fn, space, trials=trials, sampler="random", runner=runner, patience=0, out=out, resume=(out / "run.yaml").exists())
except rl.RunnerError as error:
    print(type(error).__name__, " ".join(str(error).split()))
    sys.exit(1)
"""
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

print(Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}).address, flush=True)
sys.stdin.read()
"""
JOINED = "ray-joined"
"""The runner of studies that join a cluster."""
OF_RAY = ("driver", "agent", "supervisor", "rank", "ray driver", "ray guard", "raylet", "ray worker")
VICTIMS = {
    "local": ("driver", "agent", "supervisor", "rank"),
    "ray": (*OF_RAY, "gcs"),
    JOINED: (*OF_RAY, "gcs"),
}
STILL_S = 120.0
"""Seconds without progress after which a driver counts as hung."""
GONE_S = 30.0
"""Seconds within which the processes of a killed driver must end."""
GONE_WITHOUT_HEAD_S = 90.0
"""The same on nodes of a cluster whose head is killed: Ray waits for it for a minute."""


class Study:
    """A search in its own processes, killed and resumed until it is finished."""

    def __init__(self, folder: Path, runner: str, trials: int, counts: collections.Counter) -> None:
        self.folder, self.runner, self.trials, self.counts = folder, runner, trials, counts
        self.known: dict[int, tuple] = {}
        """The written result of each finished trial."""
        self.since: dict[int, float] = {}
        """The time at which each was first seen."""
        (folder / "tmp").mkdir(parents=True)
        self.driver: subprocess.Popen | None = None
        self.cluster: subprocess.Popen | None = None
        """The process that started the cluster which the driver joins; None without one."""
        self._nodes: list[psutil.Process] = []
        """That process and its children."""

    def start(self) -> None:
        """Starts or restarts the driver."""
        runner = "ray" if self.runner == JOINED else self.runner
        command = [sys.executable, "-c", textwrap.dedent(STUDY), str(self.folder), runner, str(self.trials)]
        place = {"TMPDIR": str(self.folder / "tmp")}
        if self.runner == JOINED:
            place["RAY_ADDRESS"] = self._joined(place)
        with open(self.folder / "log", "ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **place})

    def _joined(self, place: dict[str, str]) -> str:
        """Returns the address of a cluster of one node; a new one if that of the last driver has lost its node."""
        if self.cluster is None or not any(self._kind(each) == "raylet" for each in self._of_cluster()):
            self.end_cluster()
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            command = [sys.executable, "-c", CLUSTER]
            self.cluster = subprocess.Popen(command, text=True, env={**os.environ, **place}, **pipes)
            self.address = self.cluster.stdout.readline().strip()
            self._nodes = self._of_cluster()
        return self.address

    def _of_cluster(self) -> list[psutil.Process]:
        """Returns the processes of the cluster that the driver joined."""
        if self.cluster is None:
            return []
        try:
            return [each for each in psutil.Process(self.cluster.pid).children(recursive=True) if each.is_running()]
        except psutil.NoSuchProcess:
            return []

    def end_cluster(self) -> None:
        """Ends the cluster, if there is one."""
        for each in {*self._nodes, *self._of_cluster()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if self.cluster is not None:
            self.cluster.kill()
            self.cluster.communicate()
        self.cluster, self._nodes = None, []

    def last_words(self) -> str:
        """Returns the last line that drivers printed."""
        return ([""] + (self.folder / "log").read_text().strip().splitlines())[-1]

    def family(self) -> list[psutil.Process]:
        """Returns the driver and its descendants.

        On a cluster that it joined these are the host agents and trials, without Ray's own workers, which may outlive
        a killed raylet until the cluster ends.
        """
        found = [each for each in self._of_cluster() if self._kind(each) in VICTIMS["local"]]
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.driver.pid)
            found += [driver, *driver.children(recursive=True)]
        return found

    def look(self) -> int:
        """Reads the written results, counts lost ones, and returns the number of finished trials."""
        if not (self.folder / "run" / "study.log").exists():
            return 0
        try:
            trials = View(self.folder / "run").trials()
        except RedlineError:
            self.counts["lost"] += len(self.known) or 1
            return 0
        now = {
            trial.number: (trial.config["x"], str(trial.measurement.status), trial.measurement.throughput)
            for trial in trials
            if not trial.pending
        }
        self.counts["lost"] += sum(now.get(number) != result for number, result in self.known.items())
        for number in now.keys() - self.known.keys():
            self.since[now[number][0]] = time.time()
        self.known = now
        return len(now)

    def victims(self) -> dict[str, list[psutil.Process]]:
        """Returns the living processes by kind."""
        found = collections.defaultdict(list)
        for each in sorted({*self.family(), *self._of_cluster()}, key=lambda one: one.pid):
            with contextlib.suppress(psutil.Error):
                found[self._kind(each)].append(each)
        if self.runner == JOINED and not found["rank"]:
            found["raylet"].clear()  # a driver may wait five minutes for a node while it joins
            found["gcs"].clear()
        return found

    def _kind(self, process: psutil.Process) -> str:
        try:
            return self._kind_by(process, " ".join([process.name(), *process.cmdline()]))
        except psutil.Error:
            return "ended"

    def _kind_by(self, process: psutil.Process, words: str) -> str:
        if self.driver is not None and process.pid == self.driver.pid:
            return "driver"
        if "redline.runners.host.agent" in words:  # a fork has the command line of its parent
            above = sum("redline.runners.host.agent" in " ".join(each.cmdline()) for each in process.parents())
            return ("agent", "supervisor", "rank")[min(above, 2)]
        if "ray_driver" in words and self.driver is not None:
            return "ray guard" if process.ppid() == self.driver.pid else "ray driver"
        names = {"raylet/raylet": "raylet", "gcs_server": "gcs", "ray::RayHost": "ray worker"}
        return next((kind for name, kind in names.items() if name in words), "other")

    def settle(self, family: list[psutil.Process], within_s: float = GONE_S) -> None:
        """Counts and ends the leftovers of a driver that has ended."""
        self.driver.wait()
        _, alive = psutil.wait_procs(family, timeout=within_s)
        alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        for each in alive:
            print(f"orphaned: {each}", flush=True)
            each.kill()
        self.counts["orphaned"] += len(alive)

    def end_without_cluster(self, family: list[psutil.Process], within_s: float) -> None:
        """Waits until a driver that has lost its cluster ends by itself, and counts it if it does not."""
        try:
            self.driver.wait(STILL_S)
        except subprocess.TimeoutExpired:
            print(f"hung without a cluster: {self.folder}", flush=True)
            self.counts["hung"] += 1
            self.driver.kill()
        self.settle(family, within_s)
        if self.driver.returncode != 0:  # it had finished before
            sentence = self.last_words()
            if self.driver.returncode != 1 or not sentence.startswith("RunnerError") or "Ray" not in sentence:
                print(f"unnamed: exit code {self.driver.returncode}, {sentence}", flush=True)
                self.counts["unnamed"] += 1
        self.look()
        if any(status == "ok" for _, status, _ in self.known.values()) and not (self.folder / "run/best.yaml").exists():
            print(f"without a best.yaml: {self.folder}", flush=True)
            self.counts["lost"] += 1

    def end(self) -> None:
        """Counts the results of the finished study."""
        self.look()
        self.counts["lost"] += self.trials - len(self.known)
        for line in (self.folder / "calls").read_text().splitlines():
            x, start = line.split()
            if float(start) > self.since.get(int(x), float("inf")) + 0.1:
                print(f"repeated: {line}, known since {self.since[int(x)]}", flush=True)
                self.counts["repeated"] += 1
        left = [each for each in os.listdir(self.folder / "tmp") if each.startswith("redline-")]
        if left:
            print(f"left in the temporary directory: {left}", flush=True)
        self.counts["orphaned"] += len(left)


def inject(study: Study, draw: random.Random, most: int, kills: collections.Counter, only: list[str]) -> None:
    """Runs a study to its end and kills up to `most` of its processes, of these kinds."""
    done, moved, killed = 0, time.monotonic(), 0
    study.start()
    kinds = [kind for kind in VICTIMS[study.runner] if not only or kind in only]
    kind, next_kill = draw.choice(kinds), time.monotonic() + draw.uniform(0.5, 4)
    while (code := study.driver.poll()) != 0:
        time.sleep(0.2)
        if (now := study.look()) > done:
            done, moved = now, time.monotonic()
        if code is not None:
            print(f"the driver ended with {code}: {study.last_words()}", flush=True)
            study.start()
            moved = time.monotonic()
        if time.monotonic() - moved > STILL_S:
            print(f"hung: {study.folder}", flush=True)
            study.counts["hung"] += 1
            family = study.family()
            study.driver.kill()
            study.settle(family)
            study.start()
            moved = time.monotonic()
        if killed < most and time.monotonic() >= next_kill:
            there = study.victims()
            if not there[kind]:  # waits for one, or drivers would be killed before they have started anything
                continue
            next_kill = time.monotonic() + draw.uniform(0.5, 4)
            family = study.family()
            study.look()
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(there[kind]).kill()
                killed += 1
                kills[f"{study.runner}: {kind}"] += 1
                moved = time.monotonic()
            hit, kind = kind, draw.choice(kinds)
            if hit == "driver":
                study.settle(family)
                study.look()
                study.start()
            elif hit in ("raylet", "gcs") and study.runner == JOINED:
                study.end_without_cluster(family, GONE_WITHOUT_HEAD_S if hit == "gcs" else GONE_S)
                if hit == "gcs":
                    study.end_cluster()
                if study.driver.returncode != 0:
                    study.start()
                moved = time.monotonic()
    study.settle([])
    study.end()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--each", type=int, default=8, help="kills of one study at most")
    arguments.add_argument("--trials", type=int, default=12, help="of one study")
    arguments.add_argument("--runners", nargs="+", choices=sorted(VICTIMS), default=["local", "ray", JOINED])
    arguments.add_argument("--kinds", nargs="+", default=[], help="of processes that are killed; all without it")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    draw = random.Random(options.seed)
    counts, kills = collections.Counter(lost=0, repeated=0, orphaned=0, hung=0, unnamed=0), collections.Counter()
    begin, studies = time.monotonic(), 0
    while kills.total() < options.kills:
        # A short name, as Ray creates sockets in it.
        with tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True) as folder:
            runner = options.runners[studies % len(options.runners)]
            study = Study(Path(folder), runner, options.trials, counts)
            try:
                inject(study, draw, min(options.each, options.kills - kills.total()), kills, options.kinds)
            finally:
                study.end_cluster()
        studies += 1
        print(f"{kills.total()} kills over {studies} studies: {dict(counts)}", flush=True)
    results = {
        **counts,
        "kills": dict(sorted(kills.items())),
        "studies": studies,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "machine": machine(),
        "seed": options.seed,
    }
    write_json(options.out, results)
    print(json.dumps(results, indent=1))
    sys.exit(any(counts.values()))


if __name__ == "__main__":
    main()
