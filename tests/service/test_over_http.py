"""A worker's connection to a server over HTTP: leases are fenced, logs complete, and requests answered or withdrawn."""

import threading
import time

import pytest
from redline.base.errors import LeaseOver, NotFound, Refused, UsageError
from redline.service.pool import ServerPool
from redline.service.transport import ServerUnreachable
from redline.service.worker import small
from served import SEARCH, served
from service_pool import begun

DEVICE = {"type": "cpu", "name": "test cpu", "count": 4, "memory_mib": 1000, "capability": None, "features": []}


@pytest.fixture
def service(each_url, tmp_path):
    with served(tmp_path, url=each_url) as running:
        yield running


@pytest.fixture
def pool(service):
    made = ServerPool(service.address, service.tokens["worker"])
    yield made
    made.close()


@pytest.fixture
def worker(pool):
    return pool.join("w", "host", DEVICE, 4, 1000, {"torch": "2"})


def asked(service, key="0", devices=1):
    """Submits and takes a search and asks for a dry run, which it returns."""
    search, _ = service.store.submit(service.store.user("submitter"), SEARCH["request"], devices=devices)
    attempt = begun(service.store, search.id, DEVICE["name"])
    payload = {"requests": [{"log": "0.log"}]}
    return service.store.ask_dry_run(search.id, attempt, key, "run", payload, devices)


def test_a_dry_run_goes_to_a_worker_and_its_outcome_comes_back(service, pool, worker):
    waiting = asked(service)
    found = pool.lease(worker, 5)
    assert (found.dry_run, found.lease, found.kind, found.devices) == (waiting.id, 1, "run", 1)
    assert found.request == SEARCH["request"] and found.payload == {"requests": [{"log": "0.log"}]}
    pool.renew(found.dry_run, found.lease)
    pool.answer(found.dry_run, found.lease, {"status": "ok"})
    pool.answer(found.dry_run, found.lease, {"status": "ok"})
    assert service.store.outcome(waiting.id) == {"status": "ok"}
    pool.leave(worker)
    assert service.store.workers() == []


def test_a_late_answer_is_refused_and_the_new_worker_s_counts(service, pool, worker):
    waiting = asked(service)
    first = pool.lease(worker, 5)
    service.store.give_back(waiting.id, first.lease)
    second = pool.lease(worker, 5)
    assert second.lease == first.lease + 1
    for late in (
        lambda: pool.renew(waiting.id, first.lease),
        lambda: pool.answer(waiting.id, first.lease, {"status": "ok"}),
    ):
        with pytest.raises(LeaseOver):
            late()
    pool.give_back(waiting.id, first.lease)  # the lease is over: this has no effect
    pool.answer(waiting.id, second.lease, {"status": "oom"})
    assert service.store.outcome(waiting.id) == {"status": "oom"}
    assert "redline_answers_refused_total 1.0" in service.client(None).get("/metrics").text


def test_a_lease_that_another_user_s_worker_has_now_is_over(service, pool, worker):
    waiting = asked(service)
    first = pool.lease(worker, 5)
    service.store.give_back(waiting.id, first.lease)
    others = ServerPool(service.address, service.tokens["admin"])
    second = others.lease(others.join("v", "host", DEVICE, 4, 1000, {"torch": "2"}), 5)
    for late in (
        lambda: pool.renew(waiting.id, first.lease),
        lambda: pool.answer(waiting.id, first.lease, {"status": "ok"}),
    ):
        with pytest.raises(LeaseOver):
            late()
    with pytest.raises(Refused, match="was joined by another user"):
        pool.renew(waiting.id, second.lease)
    others.answer(waiting.id, second.lease, {"status": "oom"})
    others.close()
    assert service.store.outcome(waiting.id) == {"status": "oom"}


@pytest.mark.parametrize("outcome", [{}, {"status": "fine"}, {"status": "ok", "throughput": "much"}, {"refused": 3}])
def test_an_outcome_that_no_searcher_could_read_is_refused(service, pool, worker, outcome):
    waiting = asked(service)
    found = pool.lease(worker, 5)
    with pytest.raises(UsageError):
        pool.answer(waiting.id, found.lease, outcome)
    assert service.store.outcome(waiting.id) is None


def test_an_outcome_that_is_too_large_travels_without_its_ranks():
    ranks = [{"rank": number, "allocation_retries": 0, "why": "x" * 2000} for number in range(1000)]
    assert small({"status": "ok", "throughput": 3.0, "ranks": ranks}) == {"status": "ok", "throughput": 3.0}
    assert small({"turns": [[{"status": "ok", "ranks": ranks}]]}) == {"turns": [[{"status": "ok"}]]}
    assert small({"status": "ok", "reason": "x" * (1 << 20)})["status"] == "crash"


def test_a_question_is_answered_as_soon_as_there_is_something_to_run(service, pool, worker):
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.lease(worker, 20)))
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    waiting = asked(service)
    thread.join(timeout=15)
    assert found[0].dry_run == waiting.id
    assert time.monotonic() - start < 15
    assert pool.lease(worker, 0.2) is None


def test_a_worker_that_hangs_up_gets_nothing(service, pool, worker):
    client = service.client("worker")
    with pytest.raises(Exception, match="timed out"):
        client.post(f"/v1/workers/{worker}/lease", params={"wait": 20}, timeout=0.3)
    client.close()
    time.sleep(1.5)  # longer than the server takes to notice the closed connection
    waiting = asked(service)
    time.sleep(0.5)
    assert service.store.dry_run(waiting.id).attempts == 0
    assert pool.lease(worker, 5).dry_run == waiting.id


def test_a_log_is_put_together_from_its_pieces(service, pool, worker):
    asked(service)
    found = pool.lease(worker, 5)
    for offset, text in ((0, b"first\n"), (6, b"second\n"), (6, b"second\n")):
        pool.log(found, "0.log", offset, text)
    with service.client("reader") as client:
        path = f"/v1/searches/{found.search}/logs/0"
        assert client.get(path).content == b"first\nsecond\n"
        part = client.get(path, headers={"range": "bytes=6-11"})
        assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"second", "bytes 6-11/13")
        assert client.get(path, headers={"range": "bytes=-4"}).content == b"ond\n"
        assert client.get(path, params={"begin": 6}).content == b"second\n"
        over = client.get(path, headers={"range": "bytes=99-"})
        assert over.status_code == 416 and "13 bytes" in over.json()["error"]["message"]
    for name in ("1.log", "../../x", "0.log/../../y"):
        with pytest.raises(NotFound):
            pool.log(found, name, 0, b"x")


def test_a_log_of_a_lease_that_is_over_is_not_written(service, pool, worker):
    waiting = asked(service)
    first = pool.lease(worker, 5)
    service.store.give_back(waiting.id, first.lease)
    pool.lease(worker, 5)
    with pytest.raises(LeaseOver):
        pool.log(first, "0.log", 0, b"late")
    assert not (service.parts.runs.folder(first.search) / "logs" / "0.log").exists()


def test_a_missing_token_and_an_unreachable_server_are_distinguished(service):
    with pytest.raises(Refused, match="token"):
        ServerPool(service.address, "redline_00000000_x").join("w", "h", DEVICE, 1, 1, {})
    with pytest.raises(ServerUnreachable, match="does not answer"):
        ServerPool("http://127.0.0.1:9", service.tokens["submitter"]).join("w", "h", DEVICE, 1, 1, {})
    with pytest.raises(NotFound, match="worker"):
        ServerPool(service.address, service.tokens["worker"]).lease("0123456789ab", 0)
