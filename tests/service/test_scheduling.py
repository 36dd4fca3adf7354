"""Assignment of dry runs to workers: gangs, priorities, fair shares, quotas, backfilling, and reasons for waiting."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from redline.service.records import Contender, Running, Share, Waiting, Worker
from redline.service.scheduling import decide, matches, share_slots, why_no_slot, why_waiting

NOW = 1000.0


def worker(name, devices=8, kind="NVIDIA H100", type="cuda"):
    return Worker(
        id=name, user=1, name=name, host="h", device={"type": type, "name": kind}, devices=devices, memory_mib=1,
        software={}, seen=NOW, left=None,
    )  # fmt: skip


def wants(number, devices=1, *, user=1, search=None, priority=0, kind="NVIDIA H100", submitted=0.0, seconds=None):
    return Waiting(
        dry_run=number, search=search or f"s{number}", user=user, priority=priority, kind=kind, devices=devices,
        submitted=submitted, seconds=seconds,
    )  # fmt: skip


def runs(number, where, devices=1, *, user=1, started=NOW, seconds=None):
    return Running(
        dry_run=number, search=f"s{number}", user=user, worker=where, devices=devices, started=started, seconds=seconds
    )


def placed(waiting, running=(), workers=(), shares=()):
    return decide(waiting, list(running), list(workers), shares, NOW)


def test_a_gang_gets_all_its_devices_of_one_worker_or_none():
    assert placed([wants(1, 8)], [runs(9, "a")], [worker("a"), worker("b")]) == [(1, "b")]
    assert placed([wants(1, 8)], [runs(8, "a"), runs(9, "b")], [worker("a"), worker("b")]) == []


def test_small_ones_go_where_the_fewest_devices_are_left_over():
    workers = [worker("a"), worker("b"), worker("c", devices=2)]
    assert placed([wants(1, 2)], [runs(9, "b", 4)], workers) == [(1, "c")]
    assert placed([wants(1, 3)], [runs(9, "b", 4)], workers) == [(1, "b")]


def test_a_higher_priority_goes_first_and_then_whoever_submitted_first():
    waiting = [wants(1, submitted=1.0), wants(2, priority=5, submitted=3.0), wants(3, submitted=0.0)]
    assert [number for number, _ in placed(waiting, (), [worker("a", 1)])] == [2]
    assert [number for number, _ in placed(waiting, (), [worker("a", 2)])] == [2, 3]


def test_the_user_with_the_smallest_weighted_usage_goes_first():
    waiting = [wants(1, user=1, submitted=0.0), wants(2, user=2, submitted=9.0)]
    had = [Share(user=1, recent=500.0), Share(user=2, recent=100.0)]
    assert placed(waiting, (), [worker("a", 1)], had) == [(2, "a")]
    weighted = [Share(user=1, recent=500.0, weight=10.0), Share(user=2, recent=100.0)]
    assert placed(waiting, (), [worker("a", 1)], weighted) == [(1, "a")]


def test_running_and_placed_dry_runs_count_in_the_share():
    many = [wants(number, user=1, submitted=0.0) for number in range(1, 9)]
    few = [wants(number, user=2, submitted=9.0) for number in range(11, 19)]
    users = [1 if number < 10 else 2 for number, _ in placed(many + few, (), [worker("a", 8)])]
    assert users.count(1) == users.count(2) == 4
    running = [runs(90 + number, "a", user=1) for number in range(4)]
    assert {number for number, _ in placed(many + few, running, [worker("a", 8)])} == {11, 12, 13, 14}


def test_a_quota_holds_only_its_user_back():
    waiting = [wants(1), wants(2), wants(3, user=2)]
    assert placed(waiting, [runs(9, "a")], [worker("a")], [Share(user=1, running=2)]) == [(3, "a"), (1, "a")]
    used_up = [Share(user=1, device_hours=10.0, used_hours=10.0)]
    assert placed(waiting, (), [worker("a")], used_up) == [(3, "a")]


def test_small_ones_do_not_starve_a_gang():
    """The gang's worker drains: a dry run that would outlast the wait runs elsewhere or waits."""
    running = [runs(9, "a", 1, started=NOW, seconds=100.0), runs(10, "b", 6, started=NOW, seconds=50.0)]
    gang = wants(1, 8, submitted=0.0)
    workers = [worker("a"), worker("b")]
    assert placed([gang, wants(2, 1, submitted=5.0, seconds=80.0)], running, workers) == [(2, "a")]
    # The gang waits for the only worker: 80 s are too long, 40 s are not.
    assert placed([gang, wants(2, 1, submitted=5.0, seconds=80.0)], running[1:], [worker("b")]) == []
    assert placed([gang, wants(2, 1, submitted=5.0, seconds=40.0)], running[1:], [worker("b")]) == [(2, "b")]
    assert placed([gang, wants(2, 1, submitted=5.0)], running[1:], [worker("b")]) == []


def test_the_rest_of_a_gang_s_worker_is_filled():
    running = [runs(10, "b", 5, seconds=50.0)]
    small = [wants(number, 1, submitted=5.0, seconds=900.0) for number in (2, 3, 4)]
    # The gang takes 6 of 8 devices once the 5 are free: two small ones may run as long as they like, a third may not.
    assert placed([wants(1, 6, submitted=0.0), *small], running, [worker("b")]) == [(2, "b"), (3, "b")]


def test_few_workers_are_reserved_at_a_time():
    workers = [worker(f"w{number:02}") for number in range(16)]
    running = [runs(100 + number, each.id, 1, seconds=100.0) for number, each in enumerate(workers)]
    gangs = [wants(number, 8, submitted=0.0) for number in range(1, 9)]
    small = [wants(1000 + number, 7, submitted=1.0, seconds=900.0, user=2) for number in range(16)]
    assert len(placed(gangs + small, running, workers, [Share(user=2, recent=1e6)])) == 14


def test_a_search_stays_on_one_kind_of_device():
    workers = [worker("a", 1, "NVIDIA A100"), worker("h", 1)]
    assert placed([wants(1, search="s"), wants(2, search="s")], (), workers) == [(1, "h")]
    assert placed([wants(1), wants(2, kind="NVIDIA A100")], (), workers) == [(1, "h"), (2, "a")]


@pytest.mark.parametrize(
    ("wanted", "is_it"),
    [("", True), ("h100", True), ("cuda", True), ("NVIDIA H100", True), ("A100", False), ("cpu", False)],
)
def test_a_kind_of_device_is_asked_for_by_type_or_a_part_of_its_name(wanted, is_it):
    assert matches(wanted, {"type": "cuda", "name": "NVIDIA H100"}) is is_it


def why(waiting, running=(), workers=(), shares=()):
    return why_waiting(waiting, list(running), list(workers), shares, NOW)


def test_the_reason_why_a_search_waits_is_given():
    assert why([wants(1)]) == {"s1": "no worker is in the pool"}
    workers = [worker("a", 4), worker("b", 2, "NVIDIA A100")]
    assert why([wants(1, kind="TPU")], (), workers) == {
        "s1": "no worker has 'TPU', on which its search began; there are NVIDIA A100, NVIDIA H100"
    }
    assert why([wants(1, 8)], (), workers) == {
        "s1": "a dry run takes 8 devices of one worker, and none has more than 4"
    }
    assert why([wants(1, 4)], [runs(9, "a", 1)], workers) == {
        "s1": "waits for 4 devices of one worker: 3 of 4 are free, and others are ahead in the queue"
    }
    assert why([wants(1)], [runs(9, "a")], workers, [Share(user=1, running=1)]) == {
        "s1": "its user has 1 dry runs running, and may have 1"
    }
    assert why([wants(1)], (), workers, [Share(user=1, device_hours=2.0, used_hours=2.5)]) == {
        "s1": "its user has used 2.50 of 2 device-hours in 30 days"
    }


counts = st.integers(1, 8)
KINDS = ["H100", "A100"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(counts, st.sampled_from(KINDS)), max_size=6),
    st.lists(st.tuples(counts, st.integers(1, 3), st.integers(-1, 1), st.sampled_from(KINDS), st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(0, 5), counts), max_size=8),
    st.integers(0, 4),
)  # fmt: skip
def test_no_device_is_assigned_twice_and_no_quota_exceeded(machines, waits, busy, limit):
    workers = [worker(f"w{number}", devices, kind) for number, (devices, kind) in enumerate(machines)]
    free = {each.id: each.devices for each in workers}
    running = []
    for number, (at, devices) in enumerate(busy):
        if at < len(workers) and free[f"w{at}"] >= devices:
            free[f"w{at}"] -= devices
            running.append(runs(500 + number, f"w{at}", devices, user=1 + at % 3, seconds=10.0 * at))
    waiting = [
        wants(number, devices, user=user, priority=priority, kind=kind, seconds=30.0 if known else None)
        for number, (devices, user, priority, kind, known) in enumerate(waits)
    ]
    got = placed(waiting, running, workers, [Share(user=1, running=limit)])
    assert len({number for number, _ in got}) == len(got)
    of = {each.dry_run: each for each in waiting}
    kinds = {each.id: each.kind for each in workers}
    taken = defaultdict(int)
    for number, where in got:
        taken[where] += of[number].devices
        assert of[number].kind == kinds[where]
    assert all(taken[where] <= free[where] for where in taken)
    first = [each for each in (*running, *(of[number] for number, _ in got)) if each.user == 1]
    assert len(first) <= max(limit, sum(each.user == 1 for each in running))
    # No device idles if every waiting dry run takes one device and has no limits.
    if waiting and all(each.devices == 1 and each.user != 1 for each in waiting):
        for kind in KINDS:
            room = sum(devices for name, devices in free.items() if kinds[name] == kind)
            wanted = sum(each.kind == kind for each in waiting)
            assert sum(of[number].kind == kind for number, _ in got) == min(wanted, room)


# -- slots among the searches that run -----------------------------------------------------------------------


def contends(search, *, user=1, runs=False, leased=0, submitted=0.0, priority=0, device="", kind="", devices=1, **more):
    more = {"simulated": False, "held": False} | more
    return Contender(
        search=search, user=user, priority=priority, device=device, kind=kind, devices=devices, submitted=submitted,
        runs=runs, leased=leased, **more,
    )  # fmt: skip


def test_places_go_by_priority_then_to_who_had_least_in_a_week_for_their_weight():
    mine = [contends(f"a{each}", user=1, submitted=each) for each in range(9)]
    theirs = [contends("b", user=2, submitted=50.0), contends("c", user=3, submitted=60.0)]
    had = [Share(user=1, week=10.0), Share(user=2, week=900.0), Share(user=3, week=100.0)]
    begin, given_up = share_slots([*mine, *theirs], [], [worker("w")], had, 5)
    assert (begin, given_up) == (["a0", "c", "a1", "b", "a2"], {}), "a search counts for 600 s as soon as it has a slot"
    urgent = contends("u", user=1, priority=5, submitted=99.0)
    assert share_slots([*mine, *theirs, urgent], [], [worker("w")], had, 2)[0] == ["u", "c"]
    double = [Share(user=1, weight=4.0), Share(user=2), Share(user=3)]
    assert share_slots([*mine, *theirs], [], [worker("w")], double, 6)[0] == ["a0", "b", "c", "a1", "a2", "a3"]


def test_users_over_quota_reserve_nothing_and_every_search_has_a_reason():
    over = [Share(user=1, device_hours=10.0, used_hours=10.5), Share(user=2)]
    holders = [contends(f"a{each}", user=1, runs=True) for each in range(3)]
    busy = contends("a3", user=1, runs=True, leased=1)
    queued = [contends(f"b{each}", user=2, submitted=each) for each in range(3)]
    more = [contends("a4", user=1), contends("held", user=2, held=True), contends("gone", user=2, device="B200")]
    contenders = [*holders, busy, *queued, *more]
    begin, given_up = share_slots(contenders, [], [worker("w")], over, 4)
    assert begin == []
    used = "its user has used 10.50 of 10 device-hours in 30 days"
    assert given_up == {"a0": used, "a1": used, "a2": used}, "a worker runs something of a3"
    left = [contends(f"a{each}", user=1) for each in range(3)]
    assert share_slots([*left, busy, *queued, *more], [], [worker("w")], over, 4)[0] == ["b0", "b1", "b2"]
    assert why_no_slot(contenders, [], [worker("w")], over, 4) == {
        "a4": used,
        "b0": "4 searches run at once, and it waits for a slot: it is the next",
        "b1": "4 searches run at once, and it waits for a slot: 1 search before it",
        "b2": "4 searches run at once, and it waits for a slot: 2 searches before it",
        "held": "it is held until a user releases it",
        "gone": "no worker has 'B200'; there are NVIDIA H100",
    }


def test_a_user_has_no_more_places_than_dry_runs_at_once():
    one = [Share(user=1, running=1)]
    contenders = [contends("a", runs=True), contends("b"), contends("c", user=2)]
    assert share_slots(contenders, [], [worker("w")], one, 8)[0] == ["c"]
    assert why_no_slot(contenders, [], [worker("w")], one, 8)["b"] == (
        "its user may have 1 dry runs at once, and has 1 of their searches running"
    )


def test_a_simulated_search_needs_a_place_and_no_devices():
    assert share_slots([contends("s", simulated=True), contends("d")], [], [], [], 8)[0] == ["s"]


def test_a_search_runs_only_on_the_kind_it_was_placed_on():
    """`H100` is a part of both names; a search that was planned for one does not run on the other."""
    workers = [worker("a", 8, "NVIDIA H100 PCIe"), worker("b", 2, "NVIDIA H100")]
    wanted = wants(1)
    assert placed([wanted], (), workers) == [(1, "b")]
    assert placed([replace(wanted, devices=4)], (), workers) == []
    assert why_waiting([replace(wanted, devices=4)], [], workers, (), NOW) == {
        "s1": "a dry run takes 4 devices of one worker, and none has more than 2"
    }
    assert why_waiting([wanted], [], workers[:1], (), NOW) == {
        "s1": "no worker has 'NVIDIA H100', on which its search began; there are NVIDIA H100 PCIe"
    }
