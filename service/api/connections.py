"""Limits of connections and requests: time per phase, number per address, body sizes and rates.

uvicorn closes a connection that is idle between requests (`timeout_keep_alive`) and refuses requests beyond a number
(`limit_concurrency`). It has no deadline for a request that has begun: for its headers, its body, or a client that
reads the answer slowly. These three deadlines are kept here, at the transport, because an application sees a request
only when its headers are complete.
"""

import asyncio
import resource
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from .problems import Problem

_MOST_BUCKETS = 10_000


class Rates:
    """Token buckets that limit the requests per second of each key, with bursts."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = per_second, burst, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, key: str, message: str) -> None:
        """Counts one request.

        Raises:
            Problem: there are too many. Its `retry-after` states when to retry.
        """
        with self._lock:
            now = self._clock()
            left, since = self._buckets.get(key, (self._burst, now))
            left = min(self._burst, left + (now - since) * self._rate)
            if left >= 1:
                self._put(key, left - 1, now)
                return
            self._put(key, left, now)
            wait = (1 - left) / self._rate
        raise Problem(
            429, "too_many", message, rule=f"{self._rate:g} a second, {self._burst:g} at once",
            headers={"retry-after": str(max(1, round(wait)))},
        )  # fmt: skip

    def _put(self, key: str, left: float, now: float) -> None:
        if len(self._buckets) >= _MOST_BUCKETS and key not in self._buckets:
            full = [
                name for name, (tokens, at) in self._buckets.items() if tokens + (now - at) * self._rate >= self._burst
            ]
            for name in full or list(self._buckets)[: _MOST_BUCKETS // 2]:
                del self._buckets[name]
        self._buckets[key] = left, now


HEADER_S = 10.0
"""Deadline of a request's headers, s, from the beginning of its connection or the first byte of a later request."""
BODY_S = 60.0
"""Deadline of a request's body from then on, s."""
UNREAD_S = 60.0
"""How long a client may stop reading an answer, s."""
IDLE_S = 30
"""How long a connection without a request is kept, s."""
LARGEST_HEADER = 64 * 1024
"""Largest size of a request's headers, bytes."""
MOST = 8192
"""Connections at once, limited further by the process's number of files."""
MOST_OPENING = 1024
"""Connections at once that have no complete request yet. Beyond it the oldest is closed."""
MOST_OPENING_AN_ADDRESS = 128
"""The same for one address. A working client completes a request within milliseconds, so it is never the oldest."""
OTHER_FILES = 512
"""Files that a server needs besides connections."""


class ConnectionLimits:
    """Counts the connections of a server and limits their number.

    Args:
        most: connections at once.
        an_address: connections at once of one address.
        proxy: address of a reverse proxy, exempt from the limit of one address.
    """

    def __init__(self, most: int, an_address: int, proxy: str = "") -> None:
        self._most, self._an_address, self._proxy = most, an_address, proxy
        self._of: Counter[str] = Counter()
        self._opening: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._opening_of: dict[str, OrderedDict[LimitedProtocol, None]] = {}

    def enter(self, guard: "LimitedProtocol") -> bool:
        """Counts a new connection. Returns False if it must be closed."""
        address = guard.address
        bound = address != self._proxy
        if self._of.total() >= self._most or (bound and self._of[address] >= self._an_address):
            return False
        self._of[address] += 1
        guard.counted = True
        self._opening[guard] = None
        opening = self._opening_of.setdefault(address, OrderedDict())
        opening[guard] = None
        if bound and len(opening) > MOST_OPENING_AN_ADDRESS:
            next(iter(opening)).end()
        elif len(self._opening) > MOST_OPENING:
            next(iter(self._opening)).end()
        return True

    def opened(self, guard: "LimitedProtocol") -> None:
        """Records that a connection has a complete request."""
        if guard in self._opening:
            del self._opening[guard]
            opening = self._opening_of[guard.address]
            del opening[guard]
            if not opening:
                del self._opening_of[guard.address]

    def left(self, guard: "LimitedProtocol") -> None:
        """Records that a connection has ended."""
        self.opened(guard)
        if guard.counted:
            guard.counted = False
            self._of[guard.address] -= 1
            if not self._of[guard.address]:
                del self._of[guard.address]


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with deadlines and the limits of its `ConnectionLimits`."""

    door: ConnectionLimits
    """The server's door. Each server has its own subclass, since uvicorn creates the connections."""
    address = ""
    counted = False
    """True if the door counts it."""
    _waits_for = ""
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.door.enter(self):
            self._wait_for("headers", HEADER_S)
        else:
            self.end()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.left(self)
        self._wait_for("", 0.0)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def end(self) -> None:
        """Closes the connection at once, discarding unsent data."""
        self.door.left(self)
        self.transport.abort()

    def _look(self) -> None:
        """Sets the deadline for the current phase."""
        client_state = self.conn.their_state
        if client_state is h11.IDLE:
            # Between requests uvicorn closes it.
            in_request = self._waits_for == "headers" or bool(self.conn.trailing_data[0])
            self._wait_for("headers" if in_request else "", HEADER_S)
            return
        self.door.opened(self)
        self._wait_for("body" if client_state is h11.SEND_BODY else "", BODY_S)

    def _wait_for(self, phase: str, seconds: float) -> None:
        if phase == self._waits_for:
            return
        if self._late is not None:
            self._late.cancel()
        self._waits_for = phase
        self._late = self.loop.call_later(seconds, self.end) if phase else None


def guarded(app: Any, *, proxy: str = "127.0.0.1", **more: Any) -> Config:
    """Returns the uvicorn configuration of an application open to untrusted clients.

    Args:
        app: the application.
        proxy: address of a trusted reverse proxy.
        more: other arguments of `uvicorn.Config`.
    """
    most = _room()
    # One address must not use up all connections, except a proxy on another host.
    door = ConnectionLimits(most, most // 2, proxy if proxy not in ("127.0.0.1", "::1") else "")
    return Config(
        app, http=type("GuardOfServer", (LimitedProtocol,), {"door": door}), loop="asyncio", ws="none", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=IDLE_S, limit_concurrency=most,
        h11_max_incomplete_event_size=LARGEST_HEADER, forwarded_allow_ips=proxy, **more,
    )  # fmt: skip


class GuardedServer(Server):
    """uvicorn's server with a time limit of `HEADER_S` for a TLS handshake; asyncio's default is a minute."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            loop.create_server = partial(  # type: ignore[method-assign]
                loop.create_server, ssl_handshake_timeout=HEADER_S
            )
        await super().startup(sockets)


def _room() -> int:
    """Returns the number of connections that this process's limit of files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(MOST, soft - OTHER_FILES)) if soft != resource.RLIM_INFINITY else MOST


def raise_file_limit() -> None:
    """Raises this process's limit of open files, since connections are files and the usual 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + 2 * OTHER_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST + 2 * OTHER_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
