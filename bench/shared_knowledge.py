"""The gain of a cluster's tenth search from the nine before it: `python bench/shared_knowledge.py [--write]`.

The clusters are simulated with parameters that the estimator does not know: efficiencies, latencies, links and
overheads are random (see `World`), and so are effects that no formula explains, most of them common to all models on a
cluster and some specific to a model. Ten searches of different models and sizes, in random order, go through the
service as in a team: submitted to a store, run by `service/searcher.py`, their dry runs leased by a worker that
returns the measurements of the cluster. Each search runs twice: after the earlier ones on its cluster, and alone, as
the first of a new server.

The result, for the first to the tenth search of a cluster, is the number of dry runs until a configuration was tried
that is truly within 2 % of the best that either of the two found: median, minimum and maximum over the clusters. A
search that never tried one counts with one dry run more than it had.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from redline.base.device import Device
from redline.base.errors import LeaseOver
from redline.estimator import Estimator, Hardware, find_hardware
from redline.results import Measurement, Status
from redline.runners import TrialRequest
from redline.service.records import SearchState
from redline.service.searcher import Searcher
from redline.service.store import Store
from redline.space import Config
from redline.tuner.predicting import estimator_of
from redline.tuner.request import Request
from redline.tuner.task import resolve_task

SEARCHES: tuple[dict[str, Any], ...] = (
    {"target": "gpt2-xl", "devices": 8, "global_batch": 64},
    {"target": "bert-large", "devices": 8, "global_batch": 256},
    {"target": "opt-350m", "devices": 8, "global_batch": 128},
    {"target": "gpt-neo-1.3b", "devices": 8, "global_batch": 64},
    {"target": "qwen3-0.6b", "devices": 8, "global_batch": 64},
    {"target": "llama3.2-1b", "devices": 8, "global_batch": 128, "seq_len": 2048},
    {"target": "llama2-7b", "devices": 8, "global_batch": 64, "seq_len": 2048},
    {"target": "mistral-7b", "devices": 8, "global_batch": 32},
    {"target": "qwen2-7b", "devices": 8, "global_batch": 64, "seq_len": 1024},
    {"target": "llama3-8b", "devices": 8, "global_batch": 16, "seq_len": 4096},
)
NEAR = 0.98
HARDWARE = "h100-80gb"
KNOB, OWN, MEASURED = 0.08, 0.02, 0.01
"""Standard deviations of log time: of unexplained effects of all knobs, of a configuration, and of its measurement."""
MEMORY = 0.5
"""Factor of these for memory."""
COMMON = 0.7
"""Share of the knobs' variance that is common to all models on a cluster."""
EFFICIENCIES = {
    "matmul_efficiency": 0.15, "attention_efficiency": 0.25, "eager_attention_efficiency": 0.25,
    "bandwidth_efficiency": 0.25, "link_efficiency": 0.3, "half_rows": 0.4, "launch_us": 0.4, "collective_us": 0.5,
    "step_ms": 0.5, "hop_ms": 1.0, "slack": 0.4, "workspace_mib": 0.3, "overlap": 0.3, "sharded_overlap": 0.3,
}  # fmt: skip
"""Varying constants, and the standard deviations of their logarithms."""
MARKS = "<!-- shared knowledge -->", "<!-- end of shared knowledge -->"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "service.md"


@dataclass(frozen=True)
class World:
    """A cluster of one node of eight devices; the seed determines all of its parameters."""

    seed: int

    def normal(self, *what: Any) -> float:
        """Returns the standard normal number of a name in this world."""
        return float(np.random.default_rng([self.seed, *"|".join(map(str, what)).encode()]).normal())

    @cached_property
    def hardware(self) -> Hardware:
        """The hardware of the cluster."""
        nominal = find_hardware(HARDWARE)
        links = {}
        for name in ("intra_node", "inter_node"):
            link = getattr(nominal, name)
            links[name] = replace(
                link,
                gb_per_s=link.gb_per_s * np.exp(0.25 * self.normal(name)),
                latency_us=link.latency_us * np.exp(0.5 * self.normal(name, "latency")),
            )
        bandwidth = nominal.memory_gb_per_s * np.exp(0.1 * self.normal("bandwidth"))
        return nominal.replace(memory_gb_per_s=bandwidth, **links)

    def of(self, request: dict[str, Any]) -> "Truth":
        """Returns the true measurements of the configurations of a request."""
        asked = Request(**request)
        task = resolve_task(asked, device=DEVICE)
        assert task.workload is not None
        known = {"devices": task.devices, "hardware": self.hardware, "memory_limit_mib": None}
        guess = estimator_of(task.workload, task.space, free_batch=task.free_batch, without=task.without, **known)
        true = {
            name: min(getattr(guess.constants, name) * np.exp(spread * self.normal(name)), _most(name))
            for name, spread in EFFICIENCIES.items()
        }
        estimator = Estimator(task.workload, self.hardware, guess.training, constants=guess.constants.replace(**true))
        return Truth(world=self, model=task.name, estimator=estimator)


def _most(name: str) -> float:
    return 0.98 if name.endswith(("efficiency", "overlap")) else np.inf


@dataclass(frozen=True)
class Truth:
    """True measurements of the configurations of a model in a world."""

    world: World
    model: str
    estimator: Estimator

    def unexplained(self, config: Config, what: str) -> float:
        """Returns the logarithm of the effects that no formula explains."""
        knobs = [(name, value) for name, value in config.items() if name not in ("dp", "grad_accum")]
        each = KNOB / np.sqrt(len(knobs))
        common = sum(self.world.normal(what, *knob) for knob in knobs) * each * np.sqrt(COMMON)
        of_model = sum(self.world.normal(what, self.model, *knob) for knob in knobs) * each * np.sqrt(1 - COMMON)
        return common + of_model + OWN * self.world.normal(what, self.model, config.id)

    def step_ms(self, config: Config) -> float:
        """Returns the true step time, regardless of memory."""
        return float(self.estimator.table([config]).step_ms[0] * np.exp(self.unexplained(config, "time")))

    def measured(self, request: TrialRequest, repeat: int) -> Measurement:
        """Returns the measurement of a dry run."""
        config = request.config
        table = self.estimator.table([config])
        row, limit = table.row(0), table.memory_limit_mib
        fullest = float(table.fullest_memory_mib[0])
        need = fullest * np.exp(MEMORY * self.unexplained(config, "memory"))
        known: dict[str, Any] = {"memory_limit_mib": limit, "started": 1.0, "seconds_total": 30.0, "devices": 8}
        if need > limit:
            return Measurement(status=Status.OOM, reason="out of memory", **known)
        seen = self.step_ms(config) * np.exp(MEASURED * self.world.normal("seen", self.model, config.id, repeat))
        rate = row.throughput * row.step_ms / seen
        peak = row.peak_memory_mib * need / fullest
        return Measurement(
            status=Status.OK, throughput=rate, unit=row.unit, step_ms=seen, peak_memory_mib=peak,
            tokens_per_second=rate if row.unit == "tokens/s" else None, **known,
        )  # fmt: skip


DEVICE = Device(type="cuda", name="NVIDIA H100 80GB HBM3", count=8, memory_mib=81_920, capability=(9, 0))


class Cluster(threading.Thread):
    """A worker that runs dry runs in a world and records the order of trials of each search."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__(daemon=True)
        from dataclasses import asdict

        self.store, self.world = store, world
        self.user = store.add_user("bench")
        device = {**DEVICE.to_dict(), "hardware": asdict(find_hardware(HARDWARE))}
        self.worker = store.join(self.user, "cluster", "cluster", device, 8, DEVICE.memory_mib, {"torch": "2"}).id
        self.truths: dict[str, Truth] = {}
        self.tried: dict[str, list[tuple[Config, bool]]] = {}
        self.repeats: dict[tuple[str, str], int] = {}
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.01):
            for each in self.store.waiting():
                try:
                    taken = self.store.lease(each.dry_run, self.worker, 300.0)
                except LeaseOver:
                    continue
                outcome = self.answer(taken.search, taken.payload["requests"][0])
                self.store.answer(taken.dry_run, taken.lease, outcome.to_dict())

    def answer(self, search: str, data: dict[str, Any]) -> Measurement:
        """Returns the outcome of a dry run."""
        request = TrialRequest.from_dict(data, Path("."))
        repeat = self.repeats[search, request.config.id] = self.repeats.get((search, request.config.id), 0) + 1
        found = self.truths[search].measured(request, repeat)
        if repeat == 1:
            self.tried[search].append((request.config, found.ok))
        return found

    def search(
        self, request: dict[str, Any], url: str, data: Path, trials: int, seed: int
    ) -> list[tuple[Config, bool]]:
        """Returns the trials of a search of the service in order, and the success of each."""
        asked = {**request, "trials": trials, "seed": seed, "patience": 0}
        made = self.store.submit(self.user, asked, devices=8)[0].id
        self.truths[made], self.tried[made] = self.world.of(request), []
        start = time.monotonic()
        Searcher(self.store, url, data, made).run()
        print(f"  {request['target']}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        assert (stored := self.store.search(made)).state is SearchState.DONE, stored.reason
        return self.tried[made]


def searched(world: World, requests: list[dict[str, Any]], trials: int, seed: int) -> list[list[tuple[Config, bool]]]:
    """Returns the trials of consecutive searches on a new server."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/redline.db"
        with Store.open(url) as store:
            cluster = Cluster(store, world)
            try:
                return [cluster.search(each, url, Path(folder), trials, seed) for each in requests]
            finally:
                cluster.over.set()
                cluster.join()


def reached(tried: list[tuple[Config, bool]], simulated: Truth, best_ms: float, trials: int) -> int:
    """Returns the number of dry runs until one was within 2 % of the best."""
    for number, (config, ok) in enumerate(tried, 1):
        if ok and simulated.step_ms(config) <= best_ms / NEAR:
            return number
    return trials + 1


def a_world(number: int, trials: int, again: set[int]) -> list[dict[str, Any]]:
    """Returns, for each search on a cluster, the dry runs after earlier ones, and also alone for those at `again`."""
    world = World(number)
    order = [SEARCHES[index] for index in np.random.default_rng(number).permutation(len(SEARCHES))]
    together = searched(world, order, trials, number)
    out = []
    for position, (request, after) in enumerate(zip(order, together, strict=True), 1):
        if position not in again:
            continue
        [alone] = [after] if position == 1 else searched(world, [request], trials, number)
        simulated = world.of(request)
        best_ms = min(simulated.step_ms(config) for config, ok in alone + after if ok)
        found = {
            name: reached(tried, simulated, best_ms, trials) for name, tried in (("alone", alone), ("after", after))
        }
        out.append({"world": number, "position": position, "model": request["target"], **found})
        print(out[-1], flush=True)
    return out


def table(rows: list[dict[str, Any]], trials: int) -> str:
    """Returns the results in Markdown."""
    worlds = len({row["world"] for row in rows})
    lines = [
        f"Dry runs until within 2 % of the best, on {worlds} simulated clusters (`bench/shared_knowledge.py --worlds "
        f"{worlds} --trials {trials}`): median, least to most.",
        "",
        "| search on the cluster | after the earlier ones | the same search alone |",
        "|---|---|---|",
    ]
    for name, chosen in (
        *(
            (str(at), [row for row in rows if row["position"] == at])
            for at in sorted({row["position"] for row in rows})
        ),
        ("all but the first", [row for row in rows if row["position"] > 1]),
    ):
        cells = [_spread([row[arm] for row in chosen]) for arm in ("after", "alone")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _spread(values: list[int]) -> str:
    return f"{statistics.median(values):g} ({min(values)} to {max(values)})" if values else ""


def main() -> None:
    """Runs the benchmark and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--trials", type=int, default=16)
    places = range(1, len(SEARCHES) + 1)
    parser.add_argument(
        "--places", type=int, nargs="+", default=list(places), choices=places, help="searches to compare"
    )
    parser.add_argument("--write", action="store_true", help="the table into docs/service.md")
    given = parser.parse_args()
    rows = [
        row for number in range(given.worlds) for row in a_world(given.first + number, given.trials, set(given.places))
    ]
    text = table(rows, given.trials)
    print(text)
    if given.write:
        page, (begin, end) = PAGE.read_text(encoding="utf-8"), MARKS
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
