"""Response times of the service over HTTP: the part of `bench/service.py` with a real server and real sockets.

`redline serve` runs as a separate process without devices, so that submitted searches wait. Measured are submissions,
one after another and by several clients at once; new and repeated estimates; 200 events per second to 200 listeners,
each of which must receive every event in order; and the response times while 500 idle streams are open. The listeners
are a separate process. Besides times the CPU time of the server is reported, which other load on the machine changes
less.
"""

import asyncio
import bisect
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from redline.service.store import Store

SUBMISSIONS, PEOPLE = 500, 8
ESTIMATES, ASKED_AGAIN = 5, 300
LISTENERS, EVENTS_A_SECOND, TELLING_S = 200, 200, 10.0
IDLE, REQUESTS = 500, 300
START_S = 120.0
"""Seconds for the start of a server, and for listeners to receive the remaining events."""
_NUMBER = re.compile(rb'"number":(\d+)')
Spread = Callable[[list[float]], dict[str, float]]


class Server(AbstractContextManager["Server"]):
    """A server process on a database, and the token of an admin."""

    def __init__(self, folder: Path, url: str) -> None:
        self.store = Store.open(url)
        self.token = self.store.new_token(self.store.add_user(f"http-{time.time_ns()}", "admin"), "bench")
        output = folder / f"output-{time.time_ns()}"
        command = [sys.executable, "-m", "redline.cli", "serve", "--data", str(folder / f"data-{time.time_ns()}")]
        command += ["--storage", url, "--port", "0", "--no-worker", "--rate", "1000000"]
        with open(output, "wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        self.address = self._wait_for(output, r"serve on (http://[^,]*),")
        self.itself = psutil.Process(self._process.pid)

    def _wait_for(self, output: Path, pattern: str) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            if found := re.search(pattern, output.read_text()):
                return found[1]
            time.sleep(0.1)
        raise SystemExit(f"the server does not start: {output.read_text()}")

    def client(self) -> httpx.Client:
        """Returns a client with a persistent connection."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=180, trust_env=False)

    @property
    def cpu_s(self) -> float:
        """CPU time of the server process, without its children."""
        used = self.itself.cpu_times()
        return used.user + used.system

    @property
    def memory_mib(self) -> float:
        """Resident memory of the server process."""
        return round(self.itself.memory_info().rss / 2**20, 1)

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self.store.close()


def over_http(url: str, folder: Path, spread: Spread) -> dict[str, Any]:
    """Runs all measurements on an empty database."""
    with Server(folder, url) as server:
        found: dict[str, Any] = {"database": "sqlite" if server.store.database.sqlite else "postgresql"}
        for name, measure in MEASURED.items():
            start = time.monotonic()
            found[name] = measure(server, spread)
            print(f"{found['database']} {name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return found


def _timed(ask: Callable[[], httpx.Response]) -> float:
    """Returns the time of a request, ms.

    Raises:
        SystemExit: it was refused.
    """
    start = time.perf_counter()
    answer = ask()
    took = 1000 * (time.perf_counter() - start)
    if answer.status_code >= 400:
        raise SystemExit(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")
    return took


def submissions(server: Server, spread: Spread) -> dict[str, Any]:
    """Searches submitted while the queue fills up, one after another and by several clients at once."""

    def some(number: int) -> list[float]:
        with server.client() as client:
            request = {"target": "llama2-7b", "devices": 8, "global_batch": 512, "trials": 30}
            return [_timed(lambda: client.post("/v1/searches", json={"request": request})) for _ in range(number)]

    before = server.cpu_s
    alone = some(SUBMISSIONS)
    used = server.cpu_s - before
    with ThreadPoolExecutor(PEOPLE) as pool:
        together = [each for many in pool.map(some, [SUBMISSIONS // PEOPLE] * PEOPLE) for each in many]
    with server.client() as client:
        queue = [_timed(lambda: client.get("/v1/queue")) for _ in range(20)]
    return {
        "searches": len(alone) + len(together),
        "ms": spread(alone),
        "server_cpu_ms": round(1000 * used / len(alone), 2),
        "people": PEOPLE,
        "by_people_at_once_ms": spread(together),
        "queue_of_all_ms": spread(queue),
    }


def estimates(server: Server, spread: Spread) -> dict[str, Any]:
    """Estimates without a device: the first one, which starts the computing process; new ones; and repeated ones from
    cache.
    """
    asked = [
        {"target": "gpt2-tiny", "hardware": "h100-80gb", "devices": 8, "global_batch": 64, "seq_len": 64 * (1 + each)}
        for each in range(ESTIMATES + 1)
    ]
    with server.client() as client:
        first, *new = [_timed(lambda form=form: client.post("/v1/estimate", json=form)) for form in asked]
        again = [
            _timed(lambda each=each: client.post("/v1/estimate", json=asked[each % len(asked)]))
            for each in range(ASKED_AGAIN)
        ]
    return {
        "first_s": round(first / 1000, 2),
        "new_s": {name: round(each / 1000, 2) for name, each in spread(new).items()},
        "asked_before_ms": spread(again),
    }


def events(server: Server, spread: Spread) -> dict[str, Any]:
    """Events that another process sends at a constant rate, and the times at which listeners receive them."""
    count = int(EVENTS_A_SECOND * TELLING_S)
    with _Listeners(server, LISTENERS, count) as listeners:
        before, start, sent = server.cpu_s, time.monotonic(), []
        for number in range(count):
            time.sleep(max(0.0, start + number / EVENTS_A_SECOND - time.monotonic()))
            sent.append(time.monotonic())
            server.store.add_event(None, "said", {"number": number, "message": "x" * 60})
        seconds = time.monotonic() - start
        received: list[list[tuple[int, float]]] = listeners.received()
        used = server.cpu_s - before
    wanted = list(range(count))
    delays = [1000 * (at - sent[number]) for each in received for number, at in each if number < count]
    return {
        "listeners": len(received),
        "events": count,
        "told_per_s": round(count / seconds, 1),
        "listeners_who_missed_some": sum({number for number, _ in each} != set(wanted) for each in received),
        "listeners_out_of_order": sum([number for number, _ in each] != wanted for each in received),
        "delay_ms": spread(delays),
        "server_cpu_share": round(used / seconds, 3),
    }


def idle_streams(server: Server, spread: Spread) -> dict[str, Any]:
    """Response times without streams, and with many idle ones."""
    found: dict[str, Any] = {"streams": IDLE, "memory_mib": server.memory_mib, "without": asked(server, spread)}
    with _Listeners(server, IDLE, 0):
        return found | {"with": asked(server, spread), "memory_with_mib": server.memory_mib}


def asked(server: Server, spread: Spread) -> dict[str, Any]:
    """Response times of the owner of a token, and of the latest searches."""
    out: dict[str, Any] = {}
    with server.client() as client:
        for path in ("/v1/me", "/v1/searches?limit=20"):
            before = server.cpu_s
            out[path] = {"ms": spread([_timed(lambda path=path: client.get(path)) for _ in range(REQUESTS)])}
            out[path]["server_cpu_ms"] = round(1000 * (server.cpu_s - before) / REQUESTS, 2)
    return out


MEASURED = {"idle_streams": idle_streams, "events": events, "submit": submissions, "estimate": estimates}
"""The measurements in order: submitted searches stay in the queue."""


class _Listeners(AbstractContextManager["_Listeners"]):
    """Event streams opened by another process."""

    def __init__(self, server: Server, number: int, wanted: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        after = server.store.latest()
        self._process = context.Process(
            target=_listen, args=(server.address, server.token, number, wanted, after, child_pipe)
        )
        self._process.start()
        child_pipe.close()
        if not self._pipe.poll(START_S):
            raise SystemExit(f"{number} streams could not be opened within {START_S:g} s")
        self._pipe.recv()

    def received(self) -> list[list[tuple[int, float]]]:
        """Returns, for each listener, the numbers of the received events and their times, in order of arrival."""
        return self._pipe.recv()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()
        self._process.join(START_S)


def _listen(address: str, token: str, number: int, wanted: int, after: int, pipe: Connection) -> None:
    asyncio.run(_listening(address, token, number, wanted, after, pipe))


async def _listening(address: str, token: str, number: int, wanted: int, after: int, pipe: Connection) -> None:
    streams = [await _opened(address, token, after) for _ in range(number)]
    pipe.send("open")
    if wanted:
        sent = await asyncio.gather(*(_received(reader, wanted) for reader, _ in streams))
        pipe.send([list(_numbers(data, marks)) for data, marks in sent])
    await asyncio.to_thread(_closed, pipe)
    for _, writer in streams:
        writer.close()


def _closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


async def _opened(address: str, token: str, after: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a stream after its first bytes."""
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    lines = [f"GET /v1/events?after={after} HTTP/1.1", f"Host: {place.netloc}", f"Authorization: Bearer {token}"]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(head.decode())
    await reader.readuntil(b"retry: 1000\n\n")
    return reader, writer


async def _received(reader: asyncio.StreamReader, wanted: int) -> tuple[bytes, list[tuple[int, float]]]:
    """Returns the contents of a stream up to its last event, and the number of bytes received at each time."""
    data, marks, last = bytearray(), [], f'"number":{wanted - 1},'.encode()
    until = time.monotonic() + TELLING_S + START_S
    while last not in data[-400:]:
        try:
            part = await asyncio.wait_for(reader.read(1 << 16), until - time.monotonic())
        except TimeoutError:
            break
        if not part:
            break
        data += part
        marks.append((len(data), time.monotonic()))
    return bytes(data), marks


def _numbers(data: bytes, marks: list[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    ends = [end for end, _ in marks]
    for found in _NUMBER.finditer(data):
        yield int(found[1]), marks[bisect.bisect_left(ends, found.end())][1]


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the rows of a table: a row for each figure, a column for each database, and the goal."""

    def row(name: str, goal: str, say: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(say(each) for each in found), goal]

    first = found[0]
    sent, idle = first["events"], first["idle_streams"]["streams"]
    out = [
        row("a submission", "100", lambda each: _pair(each["submit"]["ms"])),
        row(
            f"a submission, {first['submit']['people']} clients at once", "",
            lambda each: _pair(each["submit"]["by_people_at_once_ms"]),
        ),
        row(
            f"the queue, {first['submit']['searches']:,} searches in it", "",
            lambda each: _pair(each["submit"]["queue_of_all_ms"]),
        ),
        row("a repeated estimate", "100", lambda each: _pair(each["estimate"]["asked_before_ms"])),
        row("a new estimate", "", lambda each: f"{1000 * each['estimate']['new_s']['median']:,.0f}"),
        row(
            f"an event to {sent['listeners']} listeners, {sent['told_per_s']:.0f} a second", "",
            lambda each: _pair(each["events"]["delay_ms"]),
        ),
    ]  # fmt: skip
    for path, name in (("/v1/me", "the owner of a token"), ("/v1/searches?limit=20", "20 searches")):
        for key, beside in (("without", ""), ("with", f", with {idle} idle streams")):
            out.append(row(f"{name}{beside}", "", lambda each, k=key, p=path: _pair(each["idle_streams"][k][p]["ms"])))
    return out


def words(found: list[dict[str, Any]]) -> str:
    """Returns the text below the table."""
    lines = []
    for each in found:
        sent, idle = each["events"], each["idle_streams"]
        lines.append(
            f"{each['database']}: {sent['listeners_who_missed_some']} listeners missed any of {sent['events']:,} events "
            f"and {sent['listeners_out_of_order']} received any out of order, "
            f"with {100 * sent['server_cpu_share']:.0f} % of a core; the server used {idle['memory_mib']:.0f} MiB, "
            f"{idle['memory_with_mib']:.0f} with {idle['streams']} idle streams; the "
            f"first estimate of a server, which starts the computing process, took {each['estimate']['first_s']:.1f} s."
        )
    return "\n".join(f"- {each}" for each in lines)


def _pair(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} / {spread['p99']:.1f}"
