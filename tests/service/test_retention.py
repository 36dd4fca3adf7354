"""Events of searches that ended long ago are deleted; the rest stays, and event numbers continue."""

import pytest
from redline.service import retention
from redline.service.records import SearchState
from redline.service.retention import DAY_S, Retention


def events_of(store, search=None):
    return [(each.kind, each.data.get("n", each.data.get("state"))) for each in store.events(search=search)]


@pytest.fixture
def ann(store):
    return store.add_user("ann")


@pytest.fixture
def running(store, ann):
    """A search with devices."""
    search, _ = store.submit(ann, {"model": "gpt2-tiny"}, devices=1)
    store.give_devices(search.id, "H100", 1)
    return search.id


def test_events_of_old_searches_are_deleted_and_their_end_is_kept(store, ann, running, clock, monkeypatch):
    monkeypatch.setattr("redline.service.store.store.MOST_FORGOTTEN", 3)
    old, later = running, store.submit(ann, {"model": "gpt2-tiny"}, devices=1)[0].id
    for number in range(10):
        store.add_event(old, "said", {"n": number})
        store.add_event(later, "said", {"n": number})
        store.add_event(None, "server", {"n": number})
    store.take_devices(old, SearchState.DONE, "all tried")
    clock.pass_by(31 * DAY_S)
    recent, _ = store.submit(ann, {"model": "gpt2-tiny"}, devices=1)
    store.add_event(recent.id, "said", {"n": 0})
    store.give_devices(recent.id, "H100", 1)
    store.take_devices(recent.id, SearchState.DONE, "all tried")
    store.add_event(None, "server", {"n": 10})
    store.audit("ann", "login", "here")
    before = (events_of(store, later), events_of(store, recent.id), len(store.audited()))

    assert store.forget_events(clock.now - 30 * DAY_S) == 10 + 10
    assert events_of(store, old) == [("search", "queued"), ("search", "running"), ("search", "done")]
    assert before == (events_of(store, later), events_of(store, recent.id), len(store.audited()))
    assert [event for event in events_of(store) if event[0] == "server"] == [("server", 10)]
    assert store.forget_events(clock.now - 30 * DAY_S) == 0


def test_event_numbers_continue_after_all_events_are_deleted(store, clock):
    store.add_event(None, "server", {"n": 1})
    last = store.latest()
    clock.pass_by(100 * DAY_S)
    store.forget_events(clock.now)
    assert store.latest() == last
    assert store.add_event(None, "server", {"n": 2}).id > last


@pytest.mark.parametrize(("days", "left"), [(0.5, 1), (2, 2)])
def test_a_server_forgets_after_so_many_days(store, running, clock, days, left):
    store.add_event(running, "said", {"n": 1})
    store.take_devices(running, SearchState.DONE, "all tried")
    clock.pass_by(DAY_S)
    store.add_event(None, "server", {"n": 2})
    thread = Retention(store, days)
    thread.start()
    thread.close()
    assert len([kind for kind, _ in events_of(store) if kind in ("said", "server")]) == left
    assert retention.ROUND_S >= 60
