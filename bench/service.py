"""Sharing of a pool by the service, and its response times: the figures of docs/service.md.

    python bench/service.py --out bench/results/service.json --write docs/service.md --storage sqlite:///new.db --storage URL

`--storage` names empty databases; the default is a SQLite file. `--part` measures one part and keeps the others in
`--out`.

The first part (`pool`) simulates the time of a pool with the server's own scheduling (`service/scheduling.py`): 1,024
devices on hosts of 8, and 1,000 searches that 20 users submit at once, with few or many searches each. A search has 4
dry runs waiting or running, each on 1 to 8 devices of one host; their durations are known to scheduling only as the
average of earlier ones. The results are utilisation while work waits that could run, Jain's index of the users'
device-seconds while each of them has work (over their weights), the waiting time of the last submitted search, and the
CPU time of a decision.

The second (`http`) runs a server with real sockets, see `service_http.py`. The third (`store`) measures the store
alone on a real database: the cost of a submission, and the dry runs per second that one process can request, lease and
complete. The last (`filled`, alone with `--filled`) measures lists, the queue and usage with 12,500 searches and
250,000 trials, see `service_filled.py`.

Goals: utilisation 95 % while work waits, a decision within 50 ms; over HTTP submissions and repeated estimates within
100 ms (p99), and 200 events per second to 200 listeners, none missed and all in order.
"""

import argparse
import heapq
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.base.device import usable_cores
from redline.results.environment import host, versions
from redline.service.records import Contender, Running, Share, Waiting, Worker
from redline.service.scheduling import decide, share_slots, why_no_slot, why_waiting
from redline.service.store import Store
from redline.service.store.demand import RECENT_S, WEEK_S
from service_filled import filled, growth, words as filled_words
from service_http import over_http, rows, words

PARTS = ("pool", "http", "store", "filled")
FILLED = "<!-- filled -->", "<!-- end of filled -->"
MARKS = "<!-- figures -->", "<!-- end of figures -->"
"""Marks around the figures in a page."""
NAMES = {"sqlite": "SQLite", "postgresql": "Postgres"}
H100 = {"type": "cuda", "name": "NVIDIA H100"}
SIZES = {1: 0.4, 2: 0.2, 4: 0.2, 8: 0.2}
"""Devices of a search's dry runs, and the share of searches with them."""
RUNNERS = 8
"""Concurrent searches, of the submitted ones, on a pool of 64 devices."""
AT_ONCE = 4
"""Waiting or running dry runs of a search."""


@dataclass
class Search:
    """A simulated search."""

    id: str
    user: int
    devices: int
    submitted: float
    mean_s: float
    left: int
    finished: int = 0
    seconds: float = 0.0

    @property
    def average(self) -> float | None:
        """Average duration of its dry runs, as scheduling knows it."""
        return self.seconds / self.finished if self.finished else None


class PaperPool:
    """A pool in simulated time: dry runs start as `decide` returns them, and end after their duration."""

    def __init__(
        self, hosts: int, per_host: int, searches: list[Search], users: dict[int, float], seed: int,
        slots: int | None = None,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.now, self.number = 0.0, 0
        self.devices = hosts * per_host
        self.workers = [
            Worker(
                id=f"{each:012x}", user=0, name=f"host{each}", host=f"host{each}", device=H100, devices=per_host,
                memory_mib=81920, software={}, seen=0.0, left=None,
            )
            for each in range(hosts)
        ]  # fmt: skip
        self.searches = {each.id: each for each in searches}
        self.users = users
        self.waiting: dict[int, Waiting] = {}
        self.running: dict[int, Running] = {}
        self.ends: list[tuple[float, int]] = []
        self.had: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        self.begun: dict[str, float] = {}
        self.slots = slots
        self.queued = {each.id: each for each in searches}
        self.active: set[str] = set()
        self.slots_cpu_ms: list[float] = []
        if slots is None:
            for each in searches:
                self.begin(each.id)

    def begin(self, search: str) -> None:
        """Requests the first dry runs of a search."""
        self.active.add(search)
        for _ in range(AT_ONCE):
            self.ask(self.queued[search])
        del self.queued[search]

    def contenders(self) -> list[Contender]:
        """Returns the searches that run or want to run."""
        return [
            Contender(
                search=each.id, user=each.user, priority=0, device="", kind="", devices=each.devices, simulated=False,
                held=False, submitted=each.submitted, runs=each.id in self.active, leased=0,
            )
            for each in [*self.queued.values(), *(self.searches[each] for each in self.active)]
        ]  # fmt: skip

    def share(self) -> None:
        """Starts the searches that receive a slot, as the server does."""
        asked = {each.search for each in [*self.waiting.values(), *self.running.values()]}
        self.active &= asked
        if self.slots is None or len(self.active) >= self.slots or not self.queued:
            return
        shares, running, contenders = self.shares(week=True), list(self.running.values()), self.contenders()
        start = time.thread_time()
        begin, _ = share_slots(contenders, running, self.workers, shares, self.slots)
        self.slots_cpu_ms.append(1000 * (time.thread_time() - start))
        for each in begin:
            self.begin(each)

    def ask(self, search: Search) -> None:
        """Requests another dry run of a search, if it has one left."""
        if not search.left:
            return
        search.left -= 1
        self.number += 1
        self.waiting[self.number] = Waiting(
            dry_run=self.number, search=search.id, user=search.user, priority=0, kind=H100["name"], devices=search.devices,
            submitted=search.submitted, seconds=search.average,
        )  # fmt: skip

    def shares(self, *, week: bool = False) -> list[Share]:
        """Returns the recent usage of the users, as the store does."""
        recent, longer = self._discounted(RECENT_S), self._discounted(WEEK_S) if week else {}
        return [
            Share(user=user, weight=weight, recent=recent.get(user, 0.0), week=longer.get(user, 0.0))
            for user, weight in self.users.items()
        ]

    def _discounted(self, window_s: float) -> dict[int, float]:
        since = self.now - window_s
        out: dict[int, float] = defaultdict(float)
        for user, usage in self.had.items():
            for each in reversed(usage):  # in order of their ends
                if each[1] <= since:
                    break
                out[user] += _discounted_seconds(*each, since, window_s)
        for each in self.running.values():
            out[each.user] += _discounted_seconds(each.started, self.now, each.devices, since, window_s)
        return out

    def decide(self) -> float:
        """Starts dry runs by the decision, and returns its time, s."""
        shares, waiting, running = self.shares(), list(self.waiting.values()), list(self.running.values())
        start = time.thread_time()
        placed = decide(waiting, running, self.workers, shares, self.now)
        took = time.thread_time() - start
        for number, worker in placed:
            each = self.waiting.pop(number)
            search = self.searches[each.search]
            self.begun.setdefault(search.id, self.now)
            self.running[number] = Running(
                dry_run=number, search=each.search, user=each.user, worker=worker, devices=each.devices,
                started=self.now, seconds=search.average,
            )  # fmt: skip
            heapq.heappush(self.ends, (self.now + self.rng.lognormvariate(0, 0.4) * search.mean_s, number))
        return took

    def advance(self, least_s: float) -> None:
        """Advances to the next end of a dry run, and at least by the interval of decisions."""
        self.now = max(self.now + least_s, self.ends[0][0])
        while self.ends and self.ends[0][0] <= self.now:
            end, number = heapq.heappop(self.ends)
            each = self.running.pop(number)
            search = self.searches[each.search]
            search.finished, search.seconds = search.finished + 1, search.seconds + end - each.started
            self.had[each.user].append((each.started, end, each.devices))
            self.ask(search)

    @property
    def busy(self) -> int:
        """Returns the busy devices."""
        return sum(each.devices for each in self.running.values())


def _discounted_seconds(start: float, finished: float, devices: int, since: float, window_s: float) -> float:
    start = max(start, since)
    return max(0.0, devices * (finished - start) * ((start + finished) / 2 - since) / window_s)


def searches_of(number: int, users: int, trials: int, rng: random.Random) -> list[Search]:
    """Returns searches of users with few to many searches, in the order of submission."""
    owners = rng.choices(range(users), [1 + 4 * user / users for user in range(users)], k=number)
    sizes = rng.choices(list(SIZES), list(SIZES.values()), k=number)
    return [
        Search(
            id=f"{each:012x}", user=owners[each], devices=sizes[each], submitted=each / number,
            mean_s=rng.uniform(20, 90), left=rng.randint(trials // 2, 3 * trials // 2),
        )
        for each in range(number)
    ]  # fmt: skip


def jain(values: list[float]) -> float:
    """Returns Jain's index of fairness: 1 for equal values, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(each**2 for each in values)) if any(values) else 1.0


def on_paper(
    devices: int, searches: int, users: int, trials: int, seed: int, slots: int | None = None
) -> dict[str, Any]:
    """Returns the results of a simulated pool with that many searches, of which `slots` run at once; without `slots`
    all.
    """
    rng = random.Random(seed)
    # Every fourth user has double weight.
    weights = {user: 2.0 if user % 4 == 3 else 1.0 for user in range(users)}
    pool = PaperPool(devices // 8, 8, searches_of(searches, users, trials, rng), weights, seed, slots)
    decisions, busy_s, waiting_s, fair = [], 0.0, 0.0, None
    while pool.waiting or pool.running or pool.queued:
        pool.share()
        decisions.append(pool.decide())
        wanted = {each.user for each in pool.waiting.values()} | {each.user for each in pool.queued.values()}
        before, busy, waits = pool.now, pool.busy, bool(wanted)
        if fair is None and len(wanted) < users:
            fair = _device_seconds(pool)
        pool.advance(0.5)
        if waits:
            busy_s, waiting_s = busy_s + busy * (pool.now - before), waiting_s + pool.now - before
    shares = [fair[user] / weight for user, weight in weights.items()] if fair else []
    dry_runs = sum(each.finished for each in pool.searches.values())
    by_size = {
        size: max(pool.begun[each.id] for each in pool.searches.values() if each.devices == size) for size in SIZES
    }
    return {
        "devices": devices,
        "searches": searches,
        "users": users,
        "dry_runs": dry_runs,
        "simulated_s": round(pool.now, 1),
        "dry_runs_per_simulated_minute": round(60 * dry_runs / pool.now, 1),
        "utilisation_while_work_waits": round(busy_s / (waiting_s * devices), 4),
        "waiting_s": round(waiting_s, 1),
        "jain_of_weighted_shares": round(jain(shares), 4),
        "last_search_begun_by_devices_s": {size: round(at, 1) for size, at in by_size.items()},
        "decision_cpu_ms": _spread([1000 * each for each in decisions]),
    } | ({"slots": slots, "slots_cpu_ms": _spread(pool.slots_cpu_ms)} if slots else {})


def _device_seconds(pool: PaperPool) -> dict[int, float]:
    used_seconds = dict.fromkeys(pool.users, 0.0)
    for user, each in pool.had.items():
        used_seconds[user] += sum(devices * (end - start) for start, end, devices in each)
    for running in pool.running.values():
        used_seconds[running.user] += running.devices * (pool.now - running.started)
    return used_seconds


def largest_decision(devices: int, searches: int) -> dict[str, Any]:
    """Returns the cost of a decision on an empty pool where everything waits, and of the reasons for waiting."""
    rng = random.Random(0)
    pool = PaperPool(devices // 8, 8, searches_of(searches, 20, 16, rng), dict.fromkeys(range(20), 1.0), 0)
    waiting, shares = list(pool.waiting.values()), pool.shares()
    took, waiting_ms = [], []
    for _ in range(20):
        start = time.thread_time()
        decide(waiting, [], pool.workers, shares, 0.0)
        took.append(1000 * (time.thread_time() - start))
        start = time.thread_time()
        why_waiting(waiting, [], pool.workers, shares, 0.0)
        waiting_ms.append(1000 * (time.thread_time() - start))
    queued = PaperPool(devices // 8, 8, list(pool.searches.values()), dict.fromkeys(range(20), 1.0), 0, 8).contenders()
    cpu_ms = []
    for _ in range(20):
        start = time.thread_time()
        why_no_slot(queued, [], pool.workers, shares, 8)
        cpu_ms.append(1000 * (time.thread_time() - start))
    return {
        "waiting": len(waiting),
        "decide_cpu_ms": _spread(took),
        "why_waiting_cpu_ms": _spread(waiting_ms),
        "queued": len(queued),
        "why_no_slot_cpu_ms": _spread(cpu_ms),
    }


def in_store(url: str, searches: int) -> dict[str, Any]:
    """Returns the cost of the store's work, s, on a database that fills up meanwhile."""
    with Store.open(url) as store:
        ann = store.add_user(f"bench-{time.time_ns()}")
        request = {"model": "llama2-7b", "devices": 8, "trials": 30, "filler": "x" * 1000}
        submits, ids = [], []
        for _ in range(searches):
            start = time.perf_counter()
            ids.append(store.submit(ann, request, devices=1)[0].id)
            submits.append(1000 * (time.perf_counter() - start))
        worker = store.join(ann, "bench", "host", H100, 1024, 81920, {})
        attempts = {each: store.take_search(each) for each in ids[:200]}
        for each, attempt in attempts.items():
            store.place_search(each, attempt, str(H100["name"]), {})
        start = time.perf_counter()
        asked = [store.ask_dry_run(each, attempt, "0", "run", {"x": 1}, 1) for each, attempt in attempts.items()]
        leases = [store.lease(each.id, worker.id, 60.0) for each in asked]
        for each in leases:
            store.answer(each.dry_run, each.lease, {"status": "ok"})
        rate = len(leases) / (time.perf_counter() - start)
        looks = []
        for each, attempt in attempts.items():
            store.ask_dry_run(each, attempt, "1", "run", {"x": 1}, 1)
        for _ in range(20):
            start = time.perf_counter()
            store.waiting(), store.running(), store.workers(), store.shares()
            looks.append(1000 * (time.perf_counter() - start))
        return {
            "database": "sqlite" if store.database.sqlite else "postgresql",
            "submit_ms": _spread(submits),
            "dry_runs_per_s": round(rate, 1),
            "looking_at_the_queue_ms": _spread(looks),
        }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"median": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "most": ordered[-1]}
    return {name: round(value, 2) for name, value in at.items()}


def figures(result: dict[str, Any]) -> str:
    """Returns the text of a page."""
    pool, decision = result["pool"], result["one_decision"]
    machine = (
        f"{result['host']['usable_cores']} cores of {result['host']['system']}, Python {result['versions']['python']}"
    )
    columns = [NAMES[each["database"]] for each in result["http"]]
    head = ["median / p99, ms", *columns, "goal (p99)"]
    store = ", ".join(f"{each['dry_runs_per_s']:.0f} on {NAMES[each['database']]}" for each in result["store"])
    used, slots = pool["decision_cpu_ms"], result["slots"]
    lines = [
        f"`python bench/service.py --write docs/service.md` on {machine}; server, database and clients on one host.",
        "",
        f"A simulated pool of {pool['devices']:,} devices, scheduled as the server does: {pool['searches']:,} searches of",
        f"{pool['users']} users are submitted at once; {100 * pool['utilisation_while_work_waits']:.1f} % of the devices",
        f"are busy while work waits (goal 95 %), Jain's index of the users' shares is {pool['jain_of_weighted_shares']:.3f},",
        f"a decision takes {used['median']:.1f} ms of CPU time ({used['p99']:.1f} p99), one of",
        f"{decision['waiting']:,} waiting dry runs on an empty pool {decision['decide_cpu_ms']['median']:.1f} ms.",
        f"With {slots['searches']:,} searches, of which {slots['slots']} run at once, on {slots['devices']} devices:",
        "Jain's index is",
        f"{slots['jain_of_weighted_shares']:.3f}, {100 * slots['utilisation_while_work_waits']:.1f} % of the devices are busy,",
        f"and the user of the next slot is chosen in {slots['slots_cpu_ms']['median']:.1f} ms of CPU time"
        f" ({slots['slots_cpu_ms']['p99']:.1f} p99).",
        f"Dry runs per second that one process requests, leases and completes: {store}.",
        "",
        table([head, *rows(result["http"])]),
        "",
        words(result["http"]),
    ]
    return "\n".join(lines)


def of_filled(result: dict[str, Any]) -> str:
    """Returns the text of a page about a filled database."""
    found = result["filled"]
    machine = (
        f"{result['host']['usable_cores']} cores of {result['host']['system']}, Python {result['versions']['python']}"
    )
    return "\n".join([
        f"`python bench/service.py --filled --write docs/service.md` on {machine}, SQLite; 8 searches run and 100 wait.",
        "",
        table(filled_words(found)),
        "",
        f"Ten times as many searches take {growth(found):.2f} times the CPU time (median of the rows); the larger database",
        f"has {found[-1]['database_mib']:,} MiB. In brackets: CPU time, which other load changes less.",
    ])  # fmt: skip


def write(page: Path, marks: tuple[str, str], text: str) -> None:
    """Writes a text between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, _, after = rest.partition(marks[1])
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")


def table(lines: list[list[str]]) -> str:
    """Returns a Markdown table."""
    first, *others = [f"| {' | '.join(each)} |" for each in lines]
    return "\n".join([first, "|" + "---|" * len(lines[0]), *others])


def main() -> None:
    """Runs the benchmark and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--trials", type=int, default=16, help="of a search, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", action="append", help="URL of an empty database; may be given several times")
    parser.add_argument("--filled", action="store_true", help="only the part with a filled database")
    parser.add_argument("--part", action="append", choices=PARTS, help="by default all; may be given several times")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--write", type=Path, help="a Markdown page with the marks of the figures")
    given = parser.parse_args()
    parts = ["filled"] if given.filled else given.part or PARTS
    result: dict[str, Any] = {}
    if given.out and given.out.exists():
        result = json.loads(given.out.read_text(encoding="utf-8"))
    if "pool" in parts:
        result["pool"] = on_paper(given.devices, given.searches, given.users, given.trials, given.seed)
        result["slots"] = on_paper(64, given.searches, given.users, given.trials, given.seed, RUNNERS)
        result["one_decision"] = largest_decision(given.devices, given.searches)
    with tempfile.TemporaryDirectory() as folder:
        urls = given.storage or [f"sqlite:///{folder}/redline.db"]
        if "http" in parts:
            result["http"] = [over_http(each, Path(folder), _spread) for each in urls]
        if "store" in parts:
            result["store"] = [in_store(each, given.searches) for each in urls]
        if "filled" in parts:
            result["filled"] = filled(Path(folder), _spread)
    result["host"] = {**host(), "usable_cores": usable_cores()}
    result["versions"] = versions()
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    if given.write:
        if set(parts) - {"filled"}:
            write(given.write, MARKS, figures(result))
        if "filled" in parts:
            write(given.write, FILLED, of_filled(result))


if __name__ == "__main__":
    main()
