"""Connections that send nothing, or only a part of a request, are closed; workers get answers meanwhile."""

import asyncio
import contextlib
import select
import socket
import threading
import time

import pytest
from redline.service.api import connections as module
from served import SPACE, served

PART = b"POST /v1/searches HTTP/1.1\r\nhost: x\r\ncontent-"


@pytest.fixture
def quick(monkeypatch):
    """Sets the deadlines to one second."""
    for name in ("HEADER_S", "BODY_S", "UNREAD_S"):
        monkeypatch.setattr(module, name, 1.0)


@pytest.fixture
def service(quick, tmp_path):
    with served(tmp_path) as running:
        yield running


def reach(service):
    port = int(service.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def ended(connection, within_s=20.0):
    """Returns True if the other side has closed the connection."""
    with contextlib.suppress(ConnectionError):
        connection.settimeout(within_s)
        return connection.recv(1 << 16) == b""
    return True


@pytest.mark.parametrize("request_head", [b"", b"GET /hea", PART])
def test_headers_that_do_not_come_end_a_connection(service, request_head):
    with reach(service) as slow:
        slow.sendall(request_head)
        assert ended(slow)


def test_a_byte_now_and_then_moves_no_deadline(service):
    with reach(service) as slow:
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 20:
                slow.sendall(b"x")
                if select.select([slow], [], [], 0.1)[0] and slow.recv(100) == b"":
                    break
        assert time.monotonic() - start < 20


def test_a_body_that_does_not_come_ends_a_connection(service):
    token = service.tokens["submitter"].encode()
    with reach(service) as slow:
        slow.sendall(b"POST /v1/searches HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + token)
        slow.sendall(b"\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        assert ended(slow)


def test_a_second_request_on_a_connection_has_the_same_deadline_and_a_pause_before_it_has_none(service):
    ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    with reach(service) as kept:
        for pause_s in (2.5, 0):
            kept.sendall(ask)
            answer = b""
            while not answer.endswith(b"}"):
                answer += kept.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause_s)
        kept.sendall(b"GET /hea")
        assert ended(kept)


def test_half_open_connections_do_not_block_others(service, monkeypatch):
    """All are from one address. If there are too many, the oldest without a complete request is closed."""
    monkeypatch.setattr(module, "HEADER_S", 600.0)
    with contextlib.ExitStack() as held, service.client() as working:
        opened = []
        for number in range(3 * module.MOST_OPENING_AN_ADDRESS):
            opened.append(held.enter_context(reach(service)))
            opened[-1].sendall(PART)
            if number % 16 == 0:
                assert working.get("/v1/me").status_code == 200
        assert all(ended(each) for each in opened[: module.MOST_OPENING_AN_ADDRESS])
        opened[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # the newest are open
            opened[-1].recv(1)
        with service.client() as another:
            assert another.get("/v1/me").status_code == 200


# -- unauthorised requests are refused before their body arrives -----------------------------------------------


@pytest.mark.parametrize(("role", "status"), [(None, b"401"), ("forged", b"401"), ("reader", b"403")])
def test_unauthorised_requests_are_refused_before_the_body_is_read(tmp_path, role, status):
    """The body is not sent first: a server that waited for it would close the connection without an answer."""
    with served(tmp_path) as running, reach(running) as connection:
        token = running.tokens.get(role, "redline_00000000_forged")
        head = f"authorization: Bearer {token}\r\n" if role else ""
        for path in ("/v1/searches", "/v1/leases/1/answer"):
            more = "content-type: application/json\r\ncontent-length: 900000\r\n\r\n"
            connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}{more}".encode())
            answer = b""
            while b"}}" not in answer:
                answer += (found := connection.recv(1 << 16))
                assert found, answer
            assert answer.startswith(b"HTTP/1.1 " + status)
            connection.sendall(b" " * 900000)


def test_bodies_are_checked_beside_the_event_loop(tmp_path, monkeypatch):
    """Checks the thread that parses a space: in the event loop's thread it would block all other requests."""
    from redline.space import Space

    threads, read = [], Space.from_dict
    monkeypatch.setattr(Space, "from_dict", lambda each: threads.append(threading.current_thread().name) or read(each))
    with served(tmp_path) as running, running.client() as client:
        request = {"target": "gpt2-tiny", "space": SPACE}
        assert client.post("/v1/searches", json={"request": request}).status_code == 201
    assert threads and all("AnyIO" in each for each in threads)


def test_a_body_of_very_many_values_is_refused_unread(tmp_path):
    with served(tmp_path) as running, running.client("worker") as client:
        wide = client.post("/v1/leases/1/answer", json={"lease": 1, "outcome": {"a": [[]] * 200_000}})
        assert wide.status_code == 422 and "too many values" in wide.json()["error"]["message"]
        narrow = client.post("/v1/leases/1/answer", json={"lease": 1, "outcome": {"a": [0] * 40_000}})
        assert narrow.status_code == 404


def test_answers_are_a_mebibyte_at_most(tmp_path):
    with served(tmp_path) as running, running.client() as client:
        large = {"lease": 1, "outcome": {"status": "x" * (1 << 20)}}
        assert client.post("/v1/leases/1/answer", json=large).status_code == 413


def test_an_address_without_a_token_asks_so_often(tmp_path):
    with served(tmp_path) as running, running.client(None) as anonymous, running.client() as working:
        seen = [anonymous.get("/v1/me").status_code for _ in range(400)]
        assert set(seen[:100]) == {401} and 429 in seen
        assert working.get("/v1/me").status_code == 200 and anonymous.get("/healthz").status_code == 200


# -- limits on connections -------------------------------------------------------------------------------------


class FakeGuard:
    def __init__(self, door, address):
        self.door, self.address, self.counted, self.over = door, address, False, False

    def end(self):
        self.over = True
        self.door.left(self)


def test_an_address_has_a_part_of_all_connections_and_a_proxy_may_have_them_all():
    door = module.ConnectionLimits(10, 5, proxy="proxy")
    guards = [FakeGuard(door, "a") for _ in range(6)]
    assert [door.enter(each) for each in guards] == [True] * 5 + [False]
    many = [FakeGuard(door, "proxy") for _ in range(6)]
    assert [door.enter(each) for each in many] == [True] * 5 + [False]  # ten in all
    guards[0].end()
    assert door.enter(many[5])
    for each in (*guards, *many):
        door.left(each)
    assert not door._of and not door._opening and not door._opening_of


def test_an_unread_answer_ends_its_connection(quick):
    """Tests the protocol alone: an application that writes without end, and a client that reads nothing."""

    async def scenario():
        gone = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.is_set():
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

        config = module.guarded(app, lifespan="off")
        config.load()
        from uvicorn.server import ServerState

        loop = asyncio.get_running_loop()
        made = []
        server = await loop.create_server(
            lambda: made.append(config.http_protocol_class(config, ServerState(), {})) or made[-1], "127.0.0.1", 0
        )
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        end = time.monotonic() + 20
        while not made or not made[0].transport.is_closing():
            assert time.monotonic() < end, "it is still there"
            await asyncio.sleep(0.05)
        gone.set()
        writer.close()
        server.close()

    asyncio.run(scenario())
