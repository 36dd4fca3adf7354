"""Searches with devices in the store: given and taken, their events, use by user and day."""

import pytest
from redline.service.records import ProcessId, SearchState
from redline.service.store.part import DAY_S
from redline.service.store.running import Report


@pytest.fixture
def ann(store):
    return store.add_user("ann", weight=2, devices=8)


@pytest.fixture
def search(store, ann):
    return store.submit(ann, {"model": "gpt2-tiny", "concurrency": 2}, devices=2)[0].id


def test_a_search_gets_devices_and_a_process_and_gives_them_back(store, search, clock):
    (contender,) = store.contenders()
    assert (contender.uses, contender.concurrency, contender.process) == (0, 2, None)
    assert store.give_devices(search, "H100", 4) and not store.give_devices(search, "H100", 4)
    process = ProcessId(pid=17, started=3.5)
    assert (store.set_process(search, process), store.set_process(search, process)) == (1, 1)
    assert store.set_process(search, ProcessId(pid=18, started=4.5)) == 2
    (contender,) = store.contenders()
    assert (contender.uses, contender.kind, contender.began, contender.process.pid) == (4, "H100", clock.now, 18)
    clock.pass_by(5)
    store.take_devices(search, SearchState.QUEUED, "paused", read=100)
    (contender,) = store.contenders()
    assert (contender.uses, contender.process, contender.queued, contender.read) == (0, None, clock.now, 100)
    assert contender.kind == "H100", "it stays on its kind"
    store.give_devices(search, "H100", 2)
    store.take_devices(search, SearchState.DONE, "trials", {"throughput": 3.0})
    record = store.search(search)
    assert (record.state, record.uses, record.best, record.ended) == ("done", 0, {"throughput": 3.0}, clock.now)
    assert record.started == clock.now - 5 and store.contenders() == []
    states = [event.data["state"] for event in store.events(search=search)]
    assert states == ["queued", "running", "queued", "running", "done"]


def test_a_search_that_ends_while_it_has_devices_keeps_its_state_and_gets_the_best_so_far(store, search):
    store.give_devices(search, "H100", 2)
    store.cancel(search)
    assert [contender.state for contender in store.contenders()] == ["cancelled"]
    store.take_devices(search, SearchState.DONE, "trials", {"throughput": 3.0})
    record = store.search(search)
    assert (record.state, record.best, record.uses) == ("cancelled", {"throughput": 3.0}, 0)


def test_a_search_that_is_over_gets_no_devices(store, search):
    store.cancel(search)
    assert not store.give_devices(search, "H100", 2)


def test_reports_become_events_and_the_state_of_the_search(store, search, tmp_path):
    store.give_devices(search, "H100", 2)
    store.add_reports(search, 0, 50, [Report(time=1.0, kind="waiting", data={"what": "predicting"})], "predicting")
    assert store.search(search).reason == "predicting"
    finished = [Report(time=2.0, kind="finished", data={"trial": n, "done": n + 1}) for n in range(3)]
    store.add_reports(search, 50, 90, finished, "")
    store.add_reports(search, 0, 50, finished, None)  # a part that was read before
    record = store.search(search)
    assert (record.trials, record.reason) == (3, "")
    assert [event.kind for event in store.events(search=search)][2:] == ["waiting", *["finished"] * 3]
    store.cancel(search)
    store.take_devices(search, SearchState.CANCELLED)
    store.delete_search(search, tmp_path / "none")
    store.add_reports(search, 90, 99, finished, None)
    store.take_devices(search, SearchState.QUEUED)
    assert store.events(search=search) == []


def test_use_is_charged_to_the_user_and_forgotten_after_a_week(store, ann, search, clock):
    store.give_devices(search, "H100", 4)
    store.charge({search: 10.0})
    store.charge({search: 5.0, "0123456789ab": 9.0})
    (share,) = store.shares()
    assert (share.week_s, share.weight, share.devices, share.searches) == (60.0, 2.0, 8, None)
    assert store.search(search).used_s == 15.0
    clock.pass_by(DAY_S)
    store.charge({search: 1.0})
    assert store.shares()[0].week_s == 64.0
    clock.pass_by(6 * DAY_S)
    assert 4.0 <= store.shares()[0].week_s < 64.0, "the first day counts in part"
    clock.pass_by(2 * DAY_S)
    assert store.shares()[0].week_s == 0.0
