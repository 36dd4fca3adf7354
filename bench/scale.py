"""Speed of the driver: `python bench/scale.py [--workers 256] [--trials 5000] [--out bench/results/scale.json]`.

A search of no-op trials, each a call to a worker in Ray; everything else is real: sampler, search loop, ledger with
its fsync, trials.csv replaced after every trial. The workers are simulated in `--processes` Ray actors, so that 256 do
not need 256 processes (with `--processes 256` they have them). `--seconds` is the duration of a trial on its worker.
Afterwards the ledger and trials.csv are read back: they must contain every trial, finished, once.

Goal: 5,000 trials on 256 workers at 50 trials/s or more with the random sampler, none lost.
"""

import argparse
import collections
import itertools
import json
import os
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

from redline.base.device import usable_cores
from redline.results import Measurement, RunFolder, Status, View
from redline.results.environment import host, versions
from redline.runners import Runner, TrialRequest
from redline.space import Config, Space
from redline.tuner.budget import Budget
from redline.tuner.samplers import make_sampler, sampler_names
from redline.tuner.search import Search

GOAL = 50.0


class Worker:
    """A process that simulates several workers."""

    def run(self, values: dict[str, Any], seconds: float) -> float:
        """Runs a trial that does nothing; returns its throughput."""
        if seconds:
            time.sleep(seconds)
        return 1000.0 / (1 + abs(values["micro_batch"] - 24) + abs(values["a"] - values["b"]))


class RayWorkers(Runner):
    """`workers` simulated workers in `processes` Ray actors."""

    name = "workers"
    confirms = False

    def __init__(self, workers: int, processes: int, seconds: float) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=processes, include_dashboard=False, logging_level="ERROR")
        self._ray, self.slots, self._seconds = ray, workers, seconds
        actor = ray.remote(Worker).options(num_cpus=1, max_concurrency=-(-workers // processes))
        self._actors = [actor.remote() for _ in range(processes)]
        ray.get([each.run.remote({"micro_batch": 1, "a": 1, "b": 1}, 0.0) for each in self._actors])
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for each in itertools.islice(itertools.cycle(self._actors), workers):
            self._free.put(each)

    def run(self, request: TrialRequest) -> Measurement:
        worker, started = self._free.get(), time.time()
        try:
            value = self._ray.get(worker.run.remote(request.config.to_dict(), self._seconds))
        finally:
            self._free.put(worker)
        return Measurement(status=Status.OK, throughput=value, started=started, seconds_total=time.time() - started)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ray.shutdown()


def space_of() -> Space:
    """Returns a space of about 100,000 configurations."""
    space = Space()
    space.choice("micro_batch", list(range(1, 33)))
    space.integer("a", 1, 40)
    space.integer("b", 1, 40)
    space.flag("c")
    return space


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of a trial on its worker, s")
    parser.add_argument("--sampler", default="random", choices=sampler_names())
    parser.add_argument("--out", type=Path, help="JSON with the figures, the machine and the versions")
    arguments = parser.parse_args()
    space = space_of()
    with tempfile.TemporaryDirectory(prefix="redline-scale-") as folder:
        runner = RayWorkers(arguments.workers, arguments.processes, arguments.seconds)
        knobs = {knob.name: knob.values for knob in space.knobs}
        with RunFolder.open(folder, {"model": "no-op"}, knobs=knobs, make_config=Config) as run, runner:
            search = Search(
                run_folder=run,
                sampler=make_sampler(arguments.sampler, space, seed=0),
                runner=runner,
                budget=Budget(trials=arguments.trials),
            )
            begin = time.perf_counter()
            search.run()
            seconds = time.perf_counter() - begin
            stamps = sorted(trial.measurement.started + trial.measurement.seconds_total for trial in run.trials())
        view = View(folder, Config)
        trials = view.trials()
        statuses = collections.Counter(str(trial.measurement.status) for trial in trials if not trial.pending)
        table = len((Path(folder) / "trials.csv").read_text().splitlines()) - 1
    rate = arguments.trials / seconds
    tail = stamps[-max(len(stamps) // 10, 2) :]
    last = (len(tail) - 1) / (tail[-1] - tail[0])
    distinct = len({trial.config for trial in trials})
    lost = arguments.trials - min(statuses["ok"], table, distinct)
    print(
        f"{arguments.trials} trials on {arguments.workers} workers ({arguments.processes} processes, "
        f"{usable_cores()} cores), {arguments.sampler}: {seconds:.1f} s, {rate:.1f} trials/s "
        f"({last:.1f} over the last tenth)"
    )
    print(f"in the ledger {dict(statuses)}, in trials.csv {table} rows, {distinct} distinct: {lost} lost")
    print(f"goal {GOAL:g} trials/s, none lost: {'met' if min(rate, last) >= GOAL and not lost else 'MISSED'}")
    if arguments.out:
        report = {
            **{name: getattr(arguments, name) for name in ("workers", "processes", "trials", "seconds", "sampler")},
            "elapsed_s": round(seconds, 2),
            "trials_per_second": round(rate, 1),
            "trials_per_second_last_tenth": round(last, 1),
            "lost": lost,
            "host": {**host(), "name": None, "cores": usable_cores()},
            "versions": versions(),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
