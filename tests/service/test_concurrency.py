"""Several threads and processes at one store, each with connections of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from redline.service.records import SearchState
from redline.service.store import Store
from redline.service.store.part import add_event
from redline.service.store.running import Report


@pytest.fixture
def real(url):
    """A store with the real clock."""
    with Store.open(url) as store:
        yield store


def at_once(url, *tasks):
    """Runs the tasks at the same moment, each with its own store, and returns their results."""
    go = threading.Barrier(len(tasks))

    def run(task):
        with Store.open(url, patience_s=60) as store:
            go.wait()
            return task(store)

    with ThreadPoolExecutor(len(tasks)) as threads:
        return [future.result() for future in [threads.submit(run, task) for task in tasks]]


def test_devices_are_given_to_a_search_once(url, real):
    search, _ = real.submit(real.add_user("ann"), {}, devices=1)
    given = at_once(url, *[lambda store: store.give_devices(search.id, "H100", 2)] * 6)
    assert given.count(True) == 1
    (contender,) = real.contenders()
    assert (contender.state, contender.uses) == (SearchState.RUNNING, 2)


def test_a_part_of_a_file_of_events_is_recorded_once(url, real):
    """A server that was killed after the transaction reads the same part again."""
    search, _ = real.submit(real.add_user("ann"), {}, devices=1)
    real.give_devices(search.id, "H100", 1)
    reports = [Report(time=1.0, kind="finished", data={"trial": 0, "done": 1})]
    at_once(url, *[lambda store: store.add_reports(search.id, 0, 40, reports, None)] * 6)
    assert [event.kind for event in real.events(search=search.id)] == ["search", "search", "finished"]
    assert real.search(search.id).trials == 1 and real.contenders()[0].read == 40


def test_a_key_used_by_many_at_once_is_one_search(url, real):
    ann = real.add_user("ann")
    results = at_once(url, *[lambda store: store.submit(ann, {"model": "gpt2"}, devices=1, key="k")] * 6)
    assert len({search.id for search, _ in results}) == len(real.searches()) == 1
    assert [new for _, new in results].count(True) == 1


def test_concurrent_readers_miss_no_event(url, real):
    """Postgres assigns numbers before transactions end: one that ends later must not have the lower number."""
    seen, writing = [], threading.Event()

    def writer(store):
        for number in range(30):
            store.add_event(None, "said", {"number": number})

    def reader(store):
        while not writing.is_set() or store.events(after=seen[-1] if seen else 0):
            seen.extend(event.id for event in store.events(after=seen[-1] if seen else 0, limit=7))

    def write_at_once():
        at_once(url, *[writer] * 4)
        writing.set()

    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(write_at_once)
        reader(real)
        written.result()
    assert seen == [event.id for event in real.events(limit=100_000)]
    assert len(seen) == 4 * 30


def test_no_event_appears_before_one_with_a_lower_number(url, real):
    """A transaction with an event blocks the others until it ends; otherwise a reader would miss its event for good."""
    ready, go_on = threading.Event(), threading.Event()

    def slowly(connection):
        add_event(connection, 0.0, None, "first", {})
        ready.set()
        go_on.wait()

    with Store.open(url) as one, Store.open(url, patience_s=60) as two, ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.database.write, slowly)
        ready.wait()
        second = threads.submit(two.add_event, None, "second", {})
        wait([second], timeout=0.5)  # it must not finish within this time
        seen = [event.kind for event in real.events()]
        go_on.set()
        first.result()
        second.result()
    assert seen == []
    assert [event.kind for event in real.events()] == ["first", "second"]
