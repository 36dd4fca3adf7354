"""Fairness of the service's scheduling, and its response times: the figures of docs/service.md.

    python bench/service.py --out bench/results/service.json --write docs/service.md
    python bench/service.py --parts filled --storage postgresql://redline@localhost/empty

- fairness: a thousand searches of ten users, with weights of 1 to 4, are queued on eight devices; the server's own
  decisions are made in simulated time. Goal: each user's share of the devices within 10 % of the weights.
- http: a server with real sockets takes submissions, and sends 200 events per second to 200 listeners. Goals: a submission
  within 100 ms (p99); no event missed, all in order.
- filled: lists, the queue and a page of a database with 1,250 and 12,500 searches, of 20 trials each. Goal: within 100 ms (p99).
"""

import asyncio
import bisect
import json
import math
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from common import machine, markdown, parser, put, read_json, write_json
from redline.service.records import Contender, SearchState, Share
from redline.service.scheduling import Kind, decide
from redline.service.store import Store
from redline.service.tables import events, searches, usage
from sqlalchemy import insert

WEIGHTS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4)
DEVICES, QUEUED, STARTED = 8, 1000, 850
SUBMISSIONS, CLIENTS = 200, 8
LISTENERS, EVENTS_A_SECOND, EVENTS_S = 200, 200, 10.0
FILLED = (1_250, 12_500)
TRIALS, REPEATS = 20, 200
START_S = 120.0
"""Seconds for the start of a server, and for listeners to receive the last events."""
DAY_S = 86400.0
REQUEST = {"target": "llama2-7b", "devices": 8, "global_batch": 512, "trials": TRIALS, "fix": {"precision": "bf16"}}
CONFIG = {"tp": 2, "pp": 1, "dp": 4, "zero": 1, "micro_batch": 4, "grad_accum": 32, "checkpoint_ratio": 0.5}
PATHS = {
    "the queue": "/v1/queue",
    "100 searches": "/v1/searches?limit=100",
    "100 finished searches": "/v1/searches?state=done&limit=100",
    "100 searches of one's own": "/v1/searches?mine=true&limit=100",
    "a later page": "/v1/searches?limit=100&after={middle}",
    "a search": "/v1/searches/{middle}",
    "the first page": "/",
}
"""Requests of the part `filled`, by name."""
IN_SERVER: dict[str, Callable[[Store], Any]] = {"shares": Store.shares, "contenders": Store.contenders}
_NUMBER = re.compile(rb'"number":(\d+)')


def main() -> None:
    """Runs the benchmark and writes its results."""
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    options.add_argument("--storage", help="URL of an empty database; by default SQLite in a temporary folder")
    options.add_argument("--out", type=Path, help="where to write the results, as JSON; other parts in it are kept")
    options.add_argument("--write", type=Path, help="a page into which the figures are written")
    arguments = options.parse_args()
    results = read_json(arguments.out) | {"machine": machine("sqlalchemy", "fastapi")}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.parts:
            results[name] = PARTS[name](Path(folder), arguments.storage)
            print(json.dumps({name: results[name]}), flush=True)
    write_json(arguments.out, results)
    if arguments.write is not None:
        put(arguments.write, "figures", page_text(results))


# -- fairness ------------------------------------------------------------------------------------------------


def fairness(folder: Path, storage: str | None) -> dict[str, Any]:
    """Returns the users' shares of the devices, relative to their weights, and the time of a decision."""
    shares, decision_ms = simulate(WEIGHTS, queued=QUEUED, started=STARTED)
    return {
        "shares": [round(share, 3) for share in shares],
        "worst": round(max(abs(share - 1) for share in shares), 3),
        "decision_ms": spread(decision_ms),
    }


def simulate(weights: Sequence[int], *, queued: int, started: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Runs queued searches on `DEVICES` devices in simulated time until so many have started.

    Returns:
        Each user's share of the devices over that of the weights, and the CPU times of decisions, ms.
    """
    draw, kind = random.Random(seed), Kind("H100", "cuda", DEVICES, 81920.0)
    # Each user has so many searches that all have work until the last one is started.
    users = [user for user, weight in enumerate(weights) for _ in range(weight)]
    contenders = [
        Contender(
            search=f"{number:04}", user=users[number % len(users)], priority=0, device="", kind="",
            devices=draw.choice([1, 1, 2, 4]), concurrency=1, queued=float(number),
            state=SearchState.QUEUED, uses=0, began=None, used_s=0.0, process=None, read=0,
        )
        for number in range(queued)
    ]  # fmt: skip
    used_s, ends, since = [0.0] * len(weights), dict[str, float](), dict[str, float]()
    now, decision_ms = 0.0, []
    while len(ends) < started:
        shares = [Share(user=user, weight=weight, week_s=used_s[user]) for user, weight in enumerate(weights)]
        begin = time.process_time()
        decision = decide(contenders, shares, [kind], now, most=DEVICES, overtaken_since=since)
        decision_ms.append(1000 * (time.process_time() - begin))
        since = {search: since.get(search, now) for search in decision.overtaken}
        starts = {start.search: start for start in decision.start}
        contenders = [
            replace(one, state=SearchState.RUNNING, kind=kind.name, uses=starts[one.search].uses, began=now)
            if one.search in starts
            else one
            for one in contenders
        ]
        ends |= {search: now + draw.lognormvariate(6.5, 0.5) for search in starts}
        running = [contender for contender in contenders if contender.uses]
        following = min(ends[contender.search] for contender in running)
        for contender in running:
            used_s[contender.user] += contender.uses * (following - now)
        now = following
        contenders = [one for one in contenders if not (one.uses and ends[one.search] <= now)]
    fair = sum(used_s) / sum(weights)
    return [seconds / weight / fair for seconds, weight in zip(used_s, weights, strict=True)], decision_ms


# -- a server ------------------------------------------------------------------------------------------------


class Server(AbstractContextManager["Server"]):
    """A server process on a database, and the token of an admin."""

    def __init__(self, folder: Path, url: str) -> None:
        self.store = Store.open(url)
        self.user = self.store.add_user(f"http-{time.time_ns()}", "admin")
        self.token = self.store.new_token(self.user, "bench")
        output = folder / f"output-{time.time_ns()}"
        command = [sys.executable, "-m", "redline.cli", "serve", "--data", str(folder / f"data-{time.time_ns()}")]
        # A cluster that does not exist, so that nothing is run.
        command += ["--storage", url, "--port", "0", "--ray-address", "127.0.0.1:1"]
        with open(output, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.address = self._wait_for(output, r"serve on (http://[^,]*),")
        self._itself = psutil.Process(self._process.pid)

    def _wait_for(self, output: Path, pattern: str) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            if match := re.search(pattern, output.read_text()):
                return match[1]
            time.sleep(0.1)
        raise SystemExit(f"the server does not start: {output.read_text()}")

    def client(self) -> httpx.Client:
        """Returns a client with a persistent connection."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=180, trust_env=False)

    @property
    def cpu_s(self) -> float:
        """CPU time of the server process, without its children."""
        used = self._itself.cpu_times()
        return used.user + used.system

    @property
    def memory_mib(self) -> float:
        """Resident memory of the server process."""
        return round(self._itself.memory_info().rss / 2**20)

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self.store.close()


def _timed(action: Callable[[], Any]) -> float:
    """Returns the time of an action, ms."""
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)


def http(folder: Path, storage: str | None) -> dict[str, Any]:
    """Returns the times of submissions and of events."""
    with Server(folder, storage or f"sqlite:///{folder / 'http.db'}") as server:

        def submit(count: int) -> list[float]:
            with server.client() as client:
                body = {"request": REQUEST}
                return [_timed(lambda: client.post("/v1/searches", json=body).raise_for_status()) for _ in range(count)]

        sent = _events(server)
        alone_ms = submit(SUBMISSIONS)
        with ThreadPoolExecutor(CLIENTS) as threads:
            at_once_ms = [ms for many in threads.map(submit, [SUBMISSIONS // CLIENTS] * CLIENTS) for ms in many]
        return {
            "submission_ms": spread(alone_ms),
            "submission_at_once_ms": spread(at_once_ms),
            "events": sent,
            "memory_mib": server.memory_mib,
        }


def _events(server: Server) -> dict[str, Any]:
    """Sends events at a constant rate from another process than the server, to listeners in a third one."""
    count = int(EVENTS_A_SECOND * EVENTS_S)
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    after = server.store.latest()
    process = context.Process(target=_listen, args=(server.address, server.token, count, after, child_pipe))
    process.start()
    child_pipe.close()
    pipe.recv()
    before, start, sent_at = server.cpu_s, time.monotonic(), []
    for number in range(count):
        time.sleep(max(0.0, start + number / EVENTS_A_SECOND - time.monotonic()))
        sent_at.append(time.monotonic())
        server.store.add_event(None, "said", {"number": number, "message": "x" * 60})
    seconds = time.monotonic() - start
    received: list[list[tuple[int, float]]] = pipe.recv()
    used_s = server.cpu_s - before
    process.join()
    expected = list(range(count))
    return {
        "listeners": len(received),
        "events": count,
        "per_s": round(count / seconds, 1),
        "missed": sum({number for number, _ in one} != set(expected) for one in received),
        "out_of_order": sum([number for number, _ in one] != expected for one in received),
        "delay_ms": spread([1000 * (at - sent_at[number]) for one in received for number, at in one]),
        "cpu_share": round(used_s / seconds, 3),
    }


def _listen(address: str, token: str, count: int, after: int, pipe: Connection) -> None:
    async def listen() -> list[list[tuple[int, float]]]:
        # A writer that is not kept would close its connection.
        streams = [await _opened(address, token, after) for _ in range(LISTENERS)]
        pipe.send("open")
        return await asyncio.gather(*(_received(reader, count) for reader, _ in streams))

    pipe.send(asyncio.run(listen()))


async def _opened(address: str, token: str, after: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a stream after its first bytes."""
    server = urlsplit(address)
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    lines = [f"GET /v1/events?after={after} HTTP/1.1", f"Host: {server.netloc}", f"Authorization: Bearer {token}"]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(head.decode())
    await reader.readuntil(b"retry: 1000\n\n")
    return reader, writer


async def _received(reader: asyncio.StreamReader, count: int) -> list[tuple[int, float]]:
    """Returns the numbers of the events of a stream up to the last one, with the times at which they arrived."""
    data, ends, times, last = bytearray(), [], [], f'"number":{count - 1},'.encode()
    until = time.monotonic() + EVENTS_S + START_S
    while last not in data[-400:]:
        try:
            chunk = await asyncio.wait_for(reader.read(1 << 16), until - time.monotonic())
        except TimeoutError:
            break
        if not chunk:
            break
        data += chunk
        ends.append(len(data))
        times.append(time.monotonic())
    return [(int(match[1]), times[bisect.bisect_left(ends, match.end())]) for match in _NUMBER.finditer(bytes(data))]


# -- a database after long use -------------------------------------------------------------------------------


def filled(folder: Path, storage: str | None) -> list[dict[str, Any]]:
    """Returns the times of frequent requests at each of `FILLED`, or at the last one with a given database."""
    results = []
    for size in FILLED if storage is None else FILLED[-1:]:
        url = storage or f"sqlite:///{folder / f'filled-{size}.db'}"
        with Server(folder, url) as server:
            middle = fill(server, size)
            wait_idle(server)  # it sends the written events to listeners
            times: dict[str, Any] = {}
            with server.client() as client:
                for name, path in PATHS.items():
                    url_path = path.format(middle=middle)
                    for _ in range(5):
                        client.get(url_path)
                    begin = server.cpu_s
                    times[name] = spread([_timed(lambda p=url_path: client.get(p)) for _ in range(REPEATS)])
                    times[name]["server_cpu_ms"] = round(1000 * (server.cpu_s - begin) / REPEATS, 2)
            for name, read in IN_SERVER.items():
                begin = time.process_time()
                times[name] = spread([_timed(lambda r=read: r(server.store)) for _ in range(REPEATS)])
                times[name]["server_cpu_ms"] = round(1000 * (time.process_time() - begin) / REPEATS, 2)
            results.append({"searches": size, "trials": size * TRIALS, "ms": times})
    return results


def wait_idle(server: Server) -> None:
    """Waits until the server uses hardly any CPU time."""
    used_s = math.inf
    while server.cpu_s - used_s > 0.05 or used_s == math.inf:
        used_s = server.cpu_s
        time.sleep(1.0)


def fill(server: Server, size: int) -> str:
    """Writes the rows of `size` searches of 20 users within 30 days, and of a queue; returns the id of a search."""
    draw, store, now = random.Random(0), server.store, time.time()
    users = [*(store.add_user(f"user{number}").id for number in range(19)), server.user.id]
    used_seconds: dict[tuple[int, int], float] = defaultdict(float)
    best = {"trial": 3, "config": CONFIG, "throughput": 12345.6, "unit": "tokens/s", "measurement": {"status": "ok"}}
    search_rows, event_rows = [], []
    for number in range(size):
        user, created = draw.choice(users), now - 30 * DAY_S * (1 - number / size)
        search_rows.append({
            "id": f"{number:012x}", "user": user, "key": f"{number}", "name": "llama2-7b", "request": REQUEST,
            "state": draw.choice(["done"] * 8 + ["failed", "cancelled"]), "reason": "trials", "priority": 0, "devices": 8,
            "device": "", "kind": "NVIDIA H100", "uses": 0, "created": created, "queued": created, "started": created,
            "ended": created + 1000, "attempt": 1, "used_s": 1000.0, "read": 9000, "trials": TRIALS, "best": best,
        })  # fmt: skip
        used_seconds[user, int((created + 1000) // DAY_S)] += 8 * 1000.0
        for trial in range(TRIALS):
            data = {"trial": trial, "config": CONFIG, "status": "ok", "throughput": 12345.6, "done": trial + 1}
            event_rows.append(
                {"search": f"{number:012x}", "time": created + 45 * trial, "kind": "finished", "data": data}
            )
    store.database.write(lambda connection: connection.execute(insert(searches), search_rows))
    for begin in range(0, len(event_rows), 10_000):
        chunk = event_rows[begin : begin + 10_000]
        store.database.write(lambda connection, chunk=chunk: connection.execute(insert(events), chunk))
    totals = [{"user": user, "day": day, "device_seconds": used_seconds[user, day]} for user, day in used_seconds]
    store.database.write(lambda connection: connection.execute(insert(usage), totals))
    for number in range(108):
        search = store.submit(users[number % len(users)], REQUEST, devices=8)[0].id
        if number < 8:
            store.give_devices(search, "NVIDIA H100", 8)
    return f"{size // 2:012x}"


PARTS: dict[str, Callable[[Path, str | None], Any]] = {"fairness": fairness, "http": http, "filled": filled}


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
    }


def page_text(results: dict[str, Any]) -> str:
    """Returns the figures in Markdown."""
    fair, over_http = results["fairness"], results["http"]
    sent = over_http["events"]
    submission_ms, at_once_ms = over_http["submission_ms"], over_http["submission_at_once_ms"]
    lines = [
        f"`python bench/service.py --write docs/service.md`, SQLite; server and clients on one host: {results['machine']}",
        "",
        f"{QUEUED:,} queued searches of {len(WEIGHTS)} users on {DEVICES} devices, in simulated time: the shares of the devices "
        f"are within {100 * fair['worst']:.1f} % of the weights {WEIGHTS} (goal 10 %); a decision takes "
        f"{fair['decision_ms']['median']:.1f} ms of CPU time ({fair['decision_ms']['p99']:.1f} p99).",
        "",
        f"A submission takes {submission_ms['median']:.1f} ms ({submission_ms['p99']:.1f} p99, goal 100), with {CLIENTS} "
        f"clients at once {at_once_ms['median']:.1f} ({at_once_ms['p99']:.1f}). Of {sent['events']:,} events, "
        f"{sent['per_s']:.0f} a second to {sent['listeners']} listeners, {sent['missed']} listeners missed one and "
        f"{sent['out_of_order']} got one out of order; they arrived after {sent['delay_ms']['median']:.0f} ms "
        f"({sent['delay_ms']['p99']:.0f} p99), with {100 * sent['cpu_share']:.0f} % of a core and "
        f"{over_http['memory_mib']:.0f} MiB.",
        "",
    ]
    sizes = results["filled"]
    header = ["median / p99 (CPU time), ms; goal 100 p99"]
    header += [f"{size['searches']:,} searches, {size['trials']:,} trials" for size in sizes]
    rows = []
    for name in sizes[0]["ms"]:
        times = [size["ms"][name] for size in sizes]
        cells = [f"{ms['median']:.1f} / {ms['p99']:.1f} ({ms['server_cpu_ms']:.1f})" for ms in times]
        rows.append([name if name in PATHS else f"{name} (in the server)", *cells])
    return "\n".join([*lines, markdown(header, rows)])


if __name__ == "__main__":
    main()
