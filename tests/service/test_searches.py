"""Searches: each submission is kept, submissions with the same key are one search, and pages and events are complete."""

import pytest
from redline.base.errors import KeyTaken, NotFound, Refused
from redline.service.records import SearchState

REQUEST = {"model": "gpt2-tiny", "trials": 16}


@pytest.fixture
def ann(store):
    return store.add_user("ann")


def test_a_search_is_kept_as_submitted(store, ann, clock):
    search, new = store.submit(ann, REQUEST, devices=8, device="H100", priority=5, name="mine", key="k")
    assert new and len(search.id) == 12
    assert (search.request, search.devices, search.device, search.priority) == (REQUEST, 8, "H100", 5)
    assert (search.owner, search.name, search.key, search.uses) == ("ann", "mine", "k", 0)
    assert (search.state, search.attempt, search.created, search.started) == ("queued", 0, clock.now, None)
    assert store.search(search.id) == search


def test_a_key_identifies_one_search_of_its_user(store, ann):
    first, _ = store.submit(ann, REQUEST, devices=2, key="k")
    assert store.submit(ann, dict(reversed(REQUEST.items())), devices=2, key="k") == (first, False)
    for other in ({"request": {**REQUEST, "trials": 17}, "devices": 2}, {"request": REQUEST, "devices": 4}):
        with pytest.raises(KeyTaken, match=f"the key 'k' belongs to the search {first.id}, of which"):
            store.submit(ann, key="k", **other)
    bobs, new = store.submit(store.add_user("bob"), REQUEST, devices=2, key="k")
    assert new and bobs.id != first.id
    assert store.submit(ann, REQUEST, devices=2)[0].id != store.submit(ann, REQUEST, devices=2)[0].id


def test_a_key_holds_when_the_search_has_found_its_kind_of_device(store, ann):
    first, _ = store.submit(ann, REQUEST, devices=1, key="k")
    assert store.give_devices(first.id, "Xeon", 1)
    again, new = store.submit(ann, REQUEST, devices=1, key="k")
    assert (again.id, again.kind, new) == (first.id, "Xeon", False)


def test_pages_of_searches_go_through_all_of_them_once(store, ann, clock):
    bob = store.add_user("bob")
    ids = []
    for number in range(12):
        ids.append(store.submit(bob if number % 3 == 0 else ann, REQUEST, devices=1)[0].id)
        clock.pass_by(number % 2)  # several have the same time
    found, after = [], None
    while page := store.searches(after=after, limit=5):
        found += [each.id for each in page]
        after = page[-1].id
    assert sorted(found) == sorted(ids) and len(found) == 12
    created = [store.search(each).created for each in found]
    assert created == sorted(created, reverse=True)
    assert {each.owner for each in store.searches(user=bob.id)} == {"bob"}
    store.give_devices(ids[3], "Xeon", 1)
    store.cancel(ids[4])
    assert [each.id for each in store.searches(state="running")] == [ids[3]]
    assert [each.id for each in store.searches(state="cancelled")] == [ids[4]]
    assert len(store.searches(state="queued")) == 10
    with pytest.raises(NotFound):
        store.searches(after="000000000000")


def test_any_text_round_trips(store, ann):
    odd = {"name": "é漢🙂\u2028'\"\\ --;", "deep": [[{"\u0000": "\u0000", "": None}]], "big": 2**70, "small": 1e-300}
    search, _ = store.submit(ann, odd, devices=1, name="Ünïcode 🙂")
    assert store.search(search.id).request == odd
    assert store.search(search.id).name == "Ünïcode 🙂"


def test_events_are_in_order_and_can_be_resumed(store, ann):
    one, _ = store.submit(ann, REQUEST, devices=1)
    two, _ = store.submit(ann, REQUEST, devices=1)
    store.give_devices(one.id, "Xeon", 1)
    event = store.add_event(one.id, "trial", {"trial": 0, "throughput": 1.5})
    store.take_devices(one.id, SearchState.FAILED, "no memory")
    every = store.events()
    assert [each.id for each in every] == sorted(each.id for each in every)
    ones = store.events(search=one.id)
    assert [(each.kind, each.data.get("state")) for each in ones] == [
        ("search", "queued"), ("search", "running"), ("trial", None), ("search", "failed"),
    ]  # fmt: skip
    assert ones[3].data["reason"] == "no memory"
    assert store.events(after=event.id) == every[-1:]
    assert store.events(after=every[0].id, limit=2) == every[1:3]
    assert store.latest() == every[-1].id
    assert {each.search for each in every} == {one.id, two.id}


def test_a_retry_counts_as_a_queued_search(store, ann):
    first, second = (store.submit(ann, REQUEST, devices=1, most_queued=2)[0] for _ in range(2))
    store.cancel(first.id)
    third, _ = store.submit(ann, REQUEST, devices=1, most_queued=2)
    with pytest.raises(Refused, match="2 searches are queued, which is this server's limit for a user"):
        store.retry(first.id, most_queued=2)
    store.cancel(third.id)
    assert store.retry(first.id, most_queued=2).state == "queued"
    assert second.state == "queued"
