"""Events of searches that ended long ago are deleted; the rest stays, and event numbers continue."""

import pytest
from redline.service import retention
from redline.service.retention import DAY_S, Retention


def events_of(store, search=None):
    return [(each.kind, each.data.get("n", each.data.get("state"))) for each in store.events(search=search)]


def test_events_of_old_searches_are_deleted_and_their_end_is_kept(pool, clock, monkeypatch):
    monkeypatch.setattr("redline.service.store.store.MOST_FORGOTTEN", 3)
    store, old = pool.store, pool.search.id
    running, _ = store.submit(pool.user, {"model": "gpt2-tiny"}, devices=1)
    for number in range(10):
        store.add_event(old, "said", {"n": number})
        store.add_event(running.id, "said", {"n": number})
        store.add_event(None, "worker", {"n": number})
    store.finish(old, pool.attempt, "done", "all tried", None)
    clock.pass_by(31 * DAY_S)
    recent, _ = store.submit(pool.user, {"model": "gpt2-tiny"}, devices=1)
    store.add_event(recent.id, "said", {"n": 0})
    store.finish(recent.id, store.take_search(recent.id), "done", "all tried", None)
    store.add_event(None, "worker", {"n": 10})
    store.audit("ann", "login", "here")
    before = (events_of(store, running.id), events_of(store, recent.id), len(store.audited()))

    assert (
        store.forget_events(clock.now - 30 * DAY_S) == 10 + 10 + 2
    )  # and those of the placement and of the pool's first worker
    assert events_of(store, old) == [("search", "queued"), ("search", "running"), ("search", "done")]
    assert before == (events_of(store, running.id), events_of(store, recent.id), len(store.audited()))
    assert [each for each in events_of(store) if each[0] == "worker"] == [("worker", 10)]
    assert store.forget_events(clock.now - 30 * DAY_S) == 0


def test_event_numbers_continue_after_all_events_are_deleted(pool, clock):
    pool.store.add_event(None, "worker", {"n": 1})
    last = pool.store.latest()
    clock.pass_by(100 * DAY_S)
    pool.store.forget_events(clock.now)
    assert pool.store.latest() == last
    assert pool.store.add_event(None, "worker", {"n": 2}).id > last


@pytest.mark.parametrize(("days", "left"), [(0.5, 1), (2, 2)])
def test_a_server_forgets_after_so_many_days(pool, clock, days, left):
    store = pool.store
    store.add_event(pool.search.id, "said", {"n": 1})
    store.finish(pool.search.id, pool.attempt, "done", "all tried", None)
    clock.pass_by(DAY_S)
    store.add_event(None, "worker", {"n": 2})
    thread = Retention(store, days)
    thread.start()
    thread.close()
    kinds = [each[0] for each in events_of(store) if each[0] in ("said", "worker") and each[1] != "joined"]
    assert len(kinds) == left
    assert retention.ROUND_S >= 60
