"""Events as a stream: none is missed and none comes twice, also after a reconnect."""

import json
import threading
import time
from itertools import islice

import pytest
from redline.service.api import feed as feeds
from redline.service.records import SearchState
from served import SEARCH, served


@pytest.fixture
def service(each_url, tmp_path):
    with served(tmp_path, url=each_url) as running:
        yield running


def read(client, path, count, **more):
    """Returns the data of the first `count` events of a stream."""
    found = []
    with client.stream("GET", path, **more) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        while len(found) < count:
            line = next(lines, None)
            if line is None:
                break
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
    return found


def test_a_search_s_events_come_from_its_beginning_to_its_end(service):
    with service.client() as client:
        search = client.post("/v1/searches", json=SEARCH).json()["id"]
        other = client.post("/v1/searches", json=SEARCH).json()["id"]
        for number in range(5):
            service.store.add_event(search, "said", {"message": str(number)})
            service.store.add_event(other, "said", {"message": "another's"})
        threading.Timer(0.5, service.store.cancel, [search]).start()
        found = read(client, f"/v1/searches/{search}/events", 100)
        assert [each["data"].get("message", each["data"].get("state")) for each in found] == [
            "queued", "0", "1", "2", "3", "4", "cancelled"
        ]  # fmt: skip
        assert {each["search"] for each in found} == {search}


def test_a_stream_continues_after_the_last_seen_event(service):
    for number in range(10):
        service.store.add_event(None, "said", {"number": number})
    time.sleep(0.3)
    with service.client("reader") as client:
        first = read(client, "/v1/events?after=0", 4)
        for number in range(10, 13):
            service.store.add_event(None, "said", {"number": number})
        rest = read(client, "/v1/events", 9, headers={"last-event-id": str(first[-1]["id"])})
    assert [each["data"]["number"] for each in first + rest] == list(range(13))
    ids = [each["id"] for each in first + rest]
    assert ids == sorted(set(ids))


def test_an_id_of_another_database_begins_now(service):
    def add_once_there_is_a_listener():
        until = time.monotonic() + 60
        while not service.parts.feed.listeners and time.monotonic() < until:
            time.sleep(0.05)
        service.store.add_event(None, "said", {"number": 1})

    with service.client() as client:
        threading.Thread(target=add_once_there_is_a_listener).start()
        assert read(client, "/v1/events?after=1000000", 1)[0]["data"] == {"number": 1}
        answer = client.get("/v1/events", headers={"last-event-id": "x"})
        assert answer.json()["error"]["message"] == "last-event-id must be a whole number, but got 'x'"
        assert answer.status_code == 422


def test_disconnected_listeners_are_removed_without_cost(service):
    with service.client() as client:
        for _ in range(20):
            service.store.add_event(None, "said", {})
            read(client, "/v1/events?after=0", 1)
        until = time.monotonic() + 10
        while service.parts.feed.listeners and time.monotonic() < until:
            time.sleep(0.05)
        assert service.parts.feed.listeners == 0
        assert client.get("/v1/me").status_code == 200


def test_a_stream_ends_when_its_token_is_revoked(service, monkeypatch):
    monkeypatch.setattr(feeds, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(feeds, "CHECKED_S", 0.1)
    with service.client("reader") as reader, service.client() as other:
        with reader.stream("GET", "/v1/events") as theirs, other.stream("GET", "/v1/events") as another:
            lines, others = theirs.iter_lines(), another.iter_lines()
            for each in range(6):  # the stream continues while the token is valid
                assert next(lines) is not None, each
            service.store.revoke(service.tokens["reader"])
            assert len(list(islice(lines, 1000))) < 1000
            service.store.add_event(None, "said", {"number": 7})
            assert "7" in next(each for each in others if each.startswith("data: "))
        assert reader.get("/v1/me").status_code == 401


def test_many_idle_listeners_hear_of_what_happens(service):
    received, subscribed = [], threading.Semaphore(0)

    def listen():
        with service.client() as client, client.stream("GET", "/v1/events") as answer:
            lines = answer.iter_lines()
            next(lines)
            subscribed.release()
            received.append(next(line for line in lines if line.startswith("data: ")))

    threads = [threading.Thread(target=listen, daemon=True) for _ in range(50)]
    for each in threads:
        each.start()
    for _ in threads:
        assert subscribed.acquire(timeout=20)
    with service.client() as client:
        assert client.get("/v1/queue").status_code == 200
    service.store.add_event(None, "said", {"number": 7})
    for each in threads:
        each.join(timeout=20)
    assert len(received) == 50 and len(set(received)) == 1


@pytest.mark.parametrize("page", [1000, 2])
def test_a_stream_of_a_retried_search_continues_after_the_earlier_failure(tmp_path, monkeypatch, page):
    """Regression: it ended at the failure of the earlier attempt, and `wait` requested it again and again."""
    monkeypatch.setattr(feeds, "PAGE", page)
    monkeypatch.setattr(feeds, "REMEMBERED", 3)
    with served(tmp_path) as service, service.rl() as client:
        store, run = service.store, client.submit("gpt2-tiny")
        service.ends(run.id, "failed", "its disk was full")
        store.retry(run.id)
        store.give_devices(run.id, "H100", 1)

        def end():
            store.take_devices(run.id, SearchState.DONE, "trials")
            store.set_priority(run.id, -1)

        ending = threading.Timer(0.5, end)
        ending.start()
        states = [each.data.get("state", each.kind) for each in run.events()]
        expected = ["queued", "running", "failed", "queued", "running", "done", "changed"]
        assert states in (expected[:-1], expected)
        ending.join()
        assert [each.data.get("state", each.kind) for each in run.events()] == expected
        with service.client() as other:
            assert len(read(other, f"/v1/searches/{run.id}/events", 100)) == len(expected)
            last = store.latest()
            assert read(other, f"/v1/searches/{run.id}/events?after={last}", 1) == []
            assert len(read(other, f"/v1/searches/{run.id}/events", 1, headers={"last-event-id": str(last - 1)})) == 1
