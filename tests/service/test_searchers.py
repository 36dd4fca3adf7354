"""The searchers of a server: one for each running search, started anew when it dies."""

import os
import signal
import time

import pytest
from pools import DEVICE, a_store
from redline.service import searchers as module
from redline.service.records import SearchState
from redline.service.searchers import MOST_DEATHS, Searchers

WAITS = "import sys; print(sys.stdin.readline(), end='', flush=True); sys.stdin.read()"
FAILS = "import sys; print(f'the disk of {sys.argv[-1]} is full', file=sys.stderr); sys.exit(7)"


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A store with a worker, and what makes searchers that run a program in the place of a search."""
    for name, seconds in (("LOOK_S", 0.05), ("FIRST_PAUSE_S", 0.01), ("LONGEST_PAUSE_S", 0.02)):
        monkeypatch.setattr(module, name, seconds)
    store, user = a_store(tmp_path)
    store.ann, made = user, []

    def searching(program, **more):
        made.append(Searchers(store, "sqlite:///it", tmp_path, program=("-c", program), **more))
        made[-1].start()
        return made[-1]

    with store:
        try:
            yield store, searching
        finally:
            for each in made:
                each.close()


def a_search(store, **more):
    return store.submit(store.ann, {"target": "gpt2-tiny"}, devices=1, **more)[0].id


def until(condition, within_s=30.0):
    """Waits until something is so."""
    begun = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begun < within_s, "it did not come to that"
        time.sleep(0.02)
    return found


def pid_of(searchers, search):
    child = searchers._children.get(search)
    return child.process.pid if child is not None and child.process is not None else None


def test_a_search_waits_for_devices_and_then_begins(service):
    store, searching = service
    search, searchers = a_search(store), searching(WAITS)
    time.sleep(0.3)
    assert not searchers._children
    store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    until(lambda: pid_of(searchers, search))


def test_the_most_urgent_begin_first_and_no_more_than_may(service):
    store, searching = service
    store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    low, first, second = a_search(store), a_search(store, priority=5), a_search(store, priority=5)
    searchers = searching(WAITS, most=2)
    until(lambda: pid_of(searchers, first) and pid_of(searchers, second))
    time.sleep(0.2)
    assert low not in searchers._children


def test_a_search_of_a_server_before_goes_on_and_one_that_is_killed_is_started_again(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(WAITS)
    first = until(lambda: pid_of(searchers, search))
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(searchers, search) not in (None, first))


def test_one_whose_search_has_ended_is_not_started_again(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(WAITS)
    pid = until(lambda: pid_of(searchers, search))
    store.cancel(search)
    os.kill(pid, signal.SIGKILL)
    until(lambda: search not in searchers._children)


def test_one_that_always_dies_has_failed_with_its_last_words(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searching(FAILS)
    found = until(lambda: store.search(search).state.ended and store.search(search))
    assert found.state is SearchState.FAILED
    assert (
        found.reason == f"its searcher died {MOST_DEATHS} times in a row, at last with 7: the disk of {search} is full"
    )


def test_searchers_end_with_their_server_and_their_searches_stay(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(WAITS)
    process = until(lambda: pid_of(searchers, search) and searchers._children[search].process)
    searchers.close()
    assert process.poll() is not None
    assert store.search(search).state is SearchState.RUNNING
