"""Response times of the service after long use: the part of `bench/service.py` with a filled database.

The rows are those of searches (users, searches, dry runs with payload and outcome, events, daily usage), written at
once; the server is a separate `redline serve` process. 8 searches run and 100 wait at either size, so that only the
number of ended searches differs.
"""

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.service.store import Store
from redline.service.tables import dry_runs, events, searches, usage
from service_http import Server, Spread
from sqlalchemy import insert

SIZES = (1_250, 12_500)
"""Ended searches. SkyPilot's load suite has as many jobs as the larger number."""
TRIALS = 20
USERS, RUNNING, QUEUED, ASKED = 20, 8, 100, 200
DAY_S = 86400.0
REQUEST = {"target": "llama2-7b", "devices": 8, "global_batch": 512, "trials": TRIALS, "fix": {"precision": "bf16"}}
CONFIG = {
    "tp": 2,
    "pp": 1,
    "dp": 4,
    "zero": 1,
    "micro_batch": 4,
    "grad_accum": 32,
    "checkpoint_ratio": 0.5,
    "fusion": True,
}
MEASURED = {
    "status": "ok", "throughput": 12345.6, "unit": "tokens/s", "step_ms": 812.3, "step_ms_spread": 4.2, "loss": 10.4,
    "peak_memory_mib": 61234.5, "memory_limit_mib": 81000.0, "seconds_total": 41.2,
    "ranks": [{"rank": each} for each in range(8)],
}  # fmt: skip
PATHS = {
    "the queue": "/v1/queue",
    "100 searches": "/v1/searches?limit=100",
    "100 finished searches": "/v1/searches?state=done&limit=100",
    "100 searches of one's own": "/v1/searches?mine=true&limit=100",
    "a later page": "/v1/searches?limit=100&after={middle}",
    "a search": "/v1/searches/{middle}",
}
IN_PROCESS: dict[str, Callable[[Store], Any]] = {
    "usage": Store.usage,
    "shares": Store.shares,
    "places": Store.contenders,
}


def filled(folder: Path, spread: Spread) -> list[dict[str, Any]]:
    """Returns the times of frequent requests at each of `SIZES`."""
    found = []
    for size in SIZES:
        url = f"sqlite:///{folder / f'filled-{size}.db'}"
        with Server(folder, url) as server:
            start = time.monotonic()
            middle = fill(server, size)
            print(f"{size:,} searches: filled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            took: dict[str, Any] = {}
            with server.client() as client:
                for name, path in PATHS.items():
                    ask = path.format(middle=middle)
                    for _ in range(5):
                        client.get(ask).raise_for_status()
                    before = server.cpu_s
                    took[name] = spread(
                        [_timed(lambda ask=ask: client.get(ask).raise_for_status()) for _ in range(ASKED)]
                    )
                    took[name]["server_cpu_ms"] = round(1000 * (server.cpu_s - before) / ASKED, 2)
            for name, read in IN_PROCESS.items():
                before = time.process_time()
                took[name] = spread([_timed(lambda read=read: read(server.store)) for _ in range(ASKED)])
                took[name]["server_cpu_ms"] = round(1000 * (time.process_time() - before) / ASKED, 2)
            mib = (folder / f"filled-{size}.db").stat().st_size / 2**20
            found.append({"searches": size, "trials": size * TRIALS, "database_mib": round(mib), "ms": took})
    return found


def fill(server: Server, size: int) -> str:
    """Writes the rows of `size` searches of `USERS` users within 30 days and of waiting and running ones; returns an id."""
    rng, store, now = random.Random(0), server.store, time.time()
    users = [store.add_user(f"user{each}").id for each in range(USERS - 1)]
    users.append(next(each.id for each in store.users() if each.name.startswith("http-")))
    host = store.join(users[0], "bench", "host", {"type": "cuda", "name": "NVIDIA H100"}, 8, 81920, {})
    used_seconds: dict[tuple[int, int], float] = defaultdict(float)
    rows: list[dict[str, Any]] = []
    for number in range(size):
        user, created = rng.choice(users), now - 30 * DAY_S * (1 - number / size)
        rows.append({
            "id": f"{number:012x}", "user": user, "key": f"{number}", "name": "llama2-7b", "request": REQUEST,
            "state": rng.choice(["done"] * 8 + ["failed", "cancelled"]), "reason": "trials", "priority": 0, "devices": 8,
            "device": "", "kind": "NVIDIA H100", "created": created, "started": created, "ended": created + 1000,
            "attempt": 1, "reuse": False, "finished": TRIALS, "seconds": 800.0, "trials": TRIALS,
            "best": {"trial": 3, "config": CONFIG, "throughput": 12345.6, "unit": "tokens/s", "measurement": MEASURED},
        })  # fmt: skip
        used_seconds[user, int((created + 1000) // DAY_S)] += TRIALS * 8 * 40.0
    for begin in range(0, size, 500):
        some = rows[begin : begin + 500]
        left = [
            {
                "search": each["id"], "key": f"trial-{trial}", "kind": "run", "payload": {"requests": [{"config": CONFIG}]},
                "devices": 8, "state": "done", "lease": 1, "worker": host.id, "outcome": MEASURED, "attempts": 1,
                "created": each["created"], "started": each["created"] + 45 * trial, "ended": each["created"] + 45 * trial + 40,
            }
            for each in some
            for trial in range(TRIALS)
        ]  # fmt: skip
        event_rows = [
            {
                "search": each["search"],
                "time": each["ended"],
                "kind": "finished",
                "data": {"trial": 1, "config": CONFIG},
            }
            for each in left
        ]
        store.database.write(
            lambda one, some=some, left=left, event_rows=event_rows: _insert(one, some, left, event_rows)
        )
    totals = [{"user": user, "day": day, "device_seconds": used_seconds[user, day]} for user, day in used_seconds]
    store.database.write(lambda one: one.execute(insert(usage), totals))
    for number in range(RUNNING + QUEUED):
        made = store.submit(users[number % USERS], REQUEST, devices=8)[0].id
        if number < RUNNING:
            attempt = store.take_search(made)
            store.place_search(made, attempt, host.kind, {})
            for trial in range(4):
                store.ask_dry_run(made, attempt, f"trial-{trial}", "run", {"requests": [{"config": CONFIG}]}, 8)
    return f"{size // 2:012x}"


def _insert(
    connection: Any, some: list[dict[str, Any]], left: list[dict[str, Any]], event_rows: list[dict[str, Any]]
) -> None:
    connection.execute(insert(searches), some)
    connection.execute(insert(dry_runs), left)
    connection.execute(insert(events), event_rows)


def _timed(ask: Callable[[], Any]) -> float:
    start = time.perf_counter()
    ask()
    return 1000 * (time.perf_counter() - start)


def words(found: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a table with a row for each request and a column for each size."""
    head = [
        "median / p99 (CPU time), ms",
        *(f"{each['searches']:,} searches, {each['trials']:,} trials" for each in found),
        "goal (p99)",
    ]
    lines = [head]
    for name in found[0]["ms"]:
        cells = [
            f"{took['median']:.1f} / {took['p99']:.1f} ({took['server_cpu_ms']:.1f})"
            for took in (each["ms"][name] for each in found)
        ]
        lines.append([name if name in PATHS else f"{name} (in the server)", *cells, "100"])
    return lines


def growth(found: list[dict[str, Any]]) -> float:
    """Returns the growth of CPU time from the first size to the last: the median over all requests."""
    first, last = found[0]["ms"], found[-1]["ms"]
    return statistics.median(last[name]["server_cpu_ms"] / first[name]["server_cpu_ms"] for name in first)
