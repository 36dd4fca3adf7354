"""A database that fails under a server: requests get an error message, and service resumes when it is back."""

import contextlib
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from redline.base.errors import StorageAhead
from redline.service.serve_options import ServeOptions
from redline.service.server import serve
from redline.service.store import connection as connections
from redline.service.tables import VERSIONS
from served import SEARCH, served
from small_disk import fill, free, on_small_disk
from sqlalchemy import event, text

LONG_S = 60.0


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch, caplog):
    """Shortens the wait for locks, and checks that no traceback is logged."""
    monkeypatch.setattr(connections, "BUSY_S", 0.3)
    yield
    assert [each.getMessage() for each in caplog.records if each.exc_info] == []


@pytest.fixture
def service(url, tmp_path):
    with served(tmp_path, url=url, patience_s=0.5) as running:
        yield running


@pytest.fixture
def client(service):
    with service.client() as made:
        yield made


def away(answer, message):
    """Checks that an answer names the problem with the database and when to retry."""
    assert answer.status_code == 503, answer.text
    detail = answer.json()["error"]
    assert detail["code"] == "storage_unavailable" and message in detail["message"], detail
    assert "the database '" in detail["message"] and answer.headers["retry-after"] == "2"
    assert "Traceback" not in answer.text


def until(ask, status):
    """Repeats a request until its answer has the status; returns that answer."""
    end = time.monotonic() + LONG_S
    while (answer := ask()).status_code != status:
        assert time.monotonic() < end, answer.text
        time.sleep(0.1)
    return answer


def submit(client, **more):
    return client.post("/v1/searches", json={**SEARCH, **more})


@contextlib.contextmanager
def locked(service, table="redline_searches"):
    """Holds a lock on another connection."""
    database = service.store.database
    if database.sqlite:
        with contextlib.closing(sqlite3.connect(database._reader.url.database, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
        return
    with connections._engine(database._reader.url).begin() as other:
        other.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        yield


def test_a_locked_database_is_reported_and_written_when_free(service, client):
    first = submit(client).json()["id"]
    with locked(service):
        away(submit(client), "lock")
        away(client.post(f"/v1/searches/{first}/cancel"), "lock")
        assert client.get("/v1/me").status_code == client.get("/healthz").status_code == 200
        if service.store.database.sqlite:  # readers do not wait for writers
            assert client.get(f"/v1/searches/{first}").json()["state"] == "queued"
    assert submit(client).status_code == 201


def test_all_requests_that_wait_for_a_lock_are_answered_without_delaying_others(service):
    """There are more requests than server threads, and each would wait for those before it."""
    many = httpx.Limits(max_connections=60)
    with locked(service), ThreadPoolExecutor(60) as pool, service.client(limits=many) as client:
        client.timeout = 2 * LONG_S
        start = time.monotonic()
        for answer in pool.map(submit, [client] * 60):
            away(answer, "")  # the lock, or connections that all wait for it
        assert time.monotonic() - start < LONG_S
        assert client.get("/v1/me").status_code == 200


def test_a_read_only_database_is_reported_and_can_be_read(service, client, cluster_of):
    first = submit(client).json()["id"]
    with cluster_of.read_only(service):
        away(submit(client), "read")
        assert client.get(f"/v1/searches/{first}").json()["state"] == "queued"
    assert until(lambda: submit(client), 201).json()["state"] == "queued"
    assert len(client.get("/v1/searches").json()["searches"]) == 2


class _ReadOnly:
    """Makes a database refuse writes."""

    @contextlib.contextmanager
    def read_only(self, service):
        engine = service.store.database._reader
        if service.store.database.sqlite:
            event.listen(engine, "connect", self._query_only)
            engine.dispose()
            yield
            event.remove(engine, "connect", self._query_only)
            engine.dispose()
            return
        self._alter(engine, "SET default_transaction_read_only = on")
        yield
        self._alter(engine, "RESET default_transaction_read_only")

    @staticmethod
    def _query_only(connection, record):
        connection.execute("PRAGMA query_only = ON")

    @staticmethod
    def _alter(engine, what):
        """Alters the database and ends its connections, so that new ones use the setting."""
        import psycopg

        name = engine.url.database
        with psycopg.connect(
            engine.url.set(drivername="postgresql", database="postgres").render_as_string(), autocommit=True
        ) as other:
            other.execute(f"ALTER DATABASE {name} {what}")
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])


@pytest.fixture
def cluster_of():
    return _ReadOnly()


def on_a_full_disk(folder):
    """Returns a server's answers to submissions and reads on a disk that fills up, and after space is freed."""
    from pathlib import Path

    with served(Path(folder), patience_s=0.5) as service, service.client() as client:
        large = {"request": {"model": {"model_type": "gpt2", "note": "x" * 50_000}}}
        first = client.post("/v1/searches", json=large)
        fill(folder)
        answers = []
        while len(answers) < 100 and (not answers or answers[-1][0] == 201):
            answer = client.post("/v1/searches", json=large)
            answers.append((answer.status_code, answer.text))
        looked = client.get(f"/v1/searches/{first.json()['id']}").status_code
        free(folder)
        again = until(lambda: client.post("/v1/searches", json=large), 201)
        return first.status_code, answers, looked, again.status_code, len(service.store.searches(limit=1000))


def test_a_full_disk_is_reported_and_stored_data_stays():
    first, answers, looked, again, kept = on_small_disk(4 << 20, on_a_full_disk)
    status, message = answers[-1]
    assert (first, status, looked, again) == (201, 503, 200, 201)
    assert "is full" in message and "storage_unavailable" in message
    assert kept == 1 + (len(answers) - 1) + 1, "those that were accepted, and none else"


def test_a_postgres_that_is_stopped_is_waited_for_and_gone_on_with(cluster, postgresql_url, tmp_path):
    with served(tmp_path, url=postgresql_url, patience_s=0.5) as service, service.client() as client:
        first = submit(client).json()["id"]
        received = []
        with client.stream("GET", f"/v1/searches/{first}/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            cluster.stop("immediate")
            try:
                away(submit(client), "cannot be used")
                away(client.get("/v1/me"), "cannot be used")
                assert client.get("/healthz").status_code == 200
                assert until(lambda: client.get("/readyz"), 503).json()["error"]["code"] == "not_ready"
            finally:
                cluster.start()
            assert until(lambda: submit(client), 201).json()["state"] == "queued"
            client.post(f"/v1/searches/{first}/cancel")
            received = [line for line in lines if line.startswith("data: ")]
        assert len(received) == 2 and '"queued"' in received[0] and '"cancelled"' in received[1]
        until(lambda: client.get("/readyz"), 200)


def test_a_stream_outlasts_a_database_that_cannot_be_read(postgresql_url, tmp_path):
    with served(tmp_path, url=postgresql_url, patience_s=0.5) as first:
        tokens, search = first.tokens, submit(first.client()).json()["id"]
    with served(tmp_path, url=postgresql_url, patience_s=0.5, tokens=tokens) as service, service.client() as client:
        with locked(service, "redline_events"), client.stream("GET", f"/v1/searches/{search}/events") as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith(":")) == ": the database is unavailable"
        threading.Timer(0.5, service.store.cancel, [search]).start()
        with client.stream("GET", f"/v1/searches/{search}/events") as stream:
            received = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert '"queued"' in received[0] and '"cancelled"' in received[-1]


def test_a_database_that_a_later_version_takes_over_is_not_misread(service, client, url, tmp_path):
    submit(client)
    change = service.store.database.write
    before = service.store.database.read(lambda c: c.execute(text(f"SELECT version_num FROM {VERSIONS}")).scalar())
    change(lambda c: c.execute(text(f"UPDATE {VERSIONS} SET version_num = '99'")))
    change(lambda c: c.execute(text("ALTER TABLE redline_searches RENAME COLUMN priority TO urgency")))
    away(client.get("/v1/searches"), "has other tables than this version of redline expects")
    away(submit(client), "has other tables than this version of redline expects")
    with pytest.raises(StorageAhead, match=r"has version 99, written by a later redline.*install the later one"):
        serve(ServeOptions(data=tmp_path / "other", storage=url, port=0))
    change(lambda c: c.execute(text("ALTER TABLE redline_searches RENAME COLUMN urgency TO priority")))
    change(lambda c: c.execute(text(f"UPDATE {VERSIONS} SET version_num = '{before}'")))
    assert until(lambda: submit(client), 201) and len(client.get("/v1/searches").json()["searches"]) == 2
