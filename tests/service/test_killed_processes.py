"""Real searches of a real model continue after their searchers and workers are killed."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import store_pool
from pools import a_store
from redline.results import View
from redline.service.records import SearchState
from redline.service.searchers import Searchers, SearcherSlots

pytestmark = pytest.mark.slow
REQUEST = {
    "target": "gpt2-tiny",
    "devices": 1,
    "trials": 4,
    "seed": 1,
    "measure_time": "0.2s",
    "fix": {"fusion": False},
}
WITHIN_S = 500.0


class Workers:
    """A worker process that is restarted when it has ended."""

    def __init__(self, url, data, user):
        self._command = [sys.executable, store_pool.__file__, url, str(data), str(user)]
        self.process = None
        self.look()

    def look(self):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self._command)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture
def service(tmp_path):
    """A store with searchers and a worker process, which tests kill."""
    store, user = a_store(tmp_path)
    url = f"sqlite:///{tmp_path}/redline.db"
    searchers, workers = Searchers(store, url, tmp_path, SearcherSlots(store)), Workers(url, tmp_path, user)
    searchers.start()
    try:
        yield store, user, searchers, workers
    finally:
        searchers.close()
        workers.close()
        store.close()


def followed(store, workers, search, on=lambda event: None):
    """Returns the events of a search once it has ended; calls `on` with each as it comes."""
    events, start = [], time.monotonic()
    while True:
        ended = store.search(search).state.ended
        for event in store.events(after=events[-1].id if events else 0, search=search):
            events.append(event)
            on(event)
        if ended:
            return events
        workers.look()
        assert time.monotonic() - start < WITHIN_S, events[-5:]
        time.sleep(0.1)


def the_process(searchers, search):
    return searchers._children[search].pid


def test_stored_outcomes_are_not_run_again_after_kills(service, tmp_path):
    store, user, searchers, workers = service
    search = store.submit(user, REQUEST, devices=1)[0].id
    killed, searchers_killed = [], set()

    def on(event):
        def once(name, kill):
            if name not in killed:
                killed.append(name)
                kill()

        def searcher():
            pid = the_process(searchers, search)
            searchers_killed.add(pid)  # it may still be the previous one, already dead
            os.kill(pid, signal.SIGKILL)

        leased = event.kind == "dry_run" and event.data["state"] == "leased"
        if event.kind == "finished" and event.data["trial"] == 0:
            once("the searcher after a trial", searcher)
        if leased and event.data["key"] == "trial-1":
            once("the searcher in a trial", searcher)
        if leased and event.data["key"] == "trial-2":
            once("the worker in a trial", workers.kill)
        if leased and "turns" in event.data["key"]:
            once("the searcher while leaders are measured again", searcher)

    events = followed(store, workers, search, on)
    found = store.search(search)
    assert (found.state, found.attempt) == (SearchState.DONE, 1 + len(searchers_killed)), found.reason
    assert len(searchers_killed) >= 2
    assert len(killed) == 4
    ended = Counter(each.data["key"] for each in events if each.kind == "dry_run" and each.data["state"] == "done")
    assert set(ended.values()) == {1}
    done = set()
    for each in events:
        if each.kind == "dry_run":
            assert each.data["key"] not in done, f"{each.data['key']} was touched after its outcome"
            if each.data["state"] == "done":
                done.add(each.data["key"])
    assert store.dry_runs(search)[2].attempts == 2  # by the killed worker, and by the one that ran it
    finished = [each.data["trial"] for each in events if each.kind == "finished"]
    assert sorted(set(finished)) == [0, 1, 2, 3]
    trials = View(tmp_path / "searches" / search, storage=f"sqlite:///{tmp_path}/redline.db").trials()
    assert [each.number for each in trials] == [0, 1, 2, 3]
    assert not any(each.pending for each in trials)
    assert found.best["throughput"] > 0


def test_a_search_that_is_cancelled_ends_its_processes_and_keeps_what_was_found(service, tmp_path):
    store, user, searchers, workers = service
    search = store.submit(user, {**REQUEST, "trials": 50, "patience": 0}, devices=1)[0].id
    followed(
        store,
        workers,
        search,
        lambda event: event.kind == "finished" and event.data["trial"] == 1 and store.cancel(search),
    )
    until = time.monotonic() + 60.0
    while search in searchers._children:
        assert time.monotonic() < until, "its searcher did not end"
        time.sleep(0.1)
    found = store.search(search)
    assert found.state is SearchState.CANCELLED
    assert found.best["throughput"] > 0
    assert not store.running()
    assert (tmp_path / "searches" / search / "best.yaml").is_file()


def test_impossible_searches_fail_with_a_message(service):
    store, user, _, workers = service
    search = store.submit(user, {**REQUEST, "fix": {"micro_bach": 4}}, devices=1)[0].id
    followed(store, workers, search)
    found = store.search(search)
    assert found.state is SearchState.FAILED
    assert "did you mean 'micro_batch'" in found.reason
