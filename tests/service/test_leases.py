"""Leases of dry runs: only the latest counts, an outcome is written once, and no finished work is lost."""

import pytest
from redline.base.errors import AttemptOver, LeaseOver, NotFound, Refused, UsageError
from redline.service.records import DryRunState
from redline.service.store.dry_runs import FORGIVEN, MOST_ATTEMPTS

OK = {"status": "ok", "throughput": 12.5}


def test_a_dry_run_is_leased_once_and_answered_once(store, pool):
    asked = pool.ask()
    assert (asked.state, asked.lease, asked.outcome) == (DryRunState.WAITING, 0, None)
    lease = pool.lease(asked)
    assert (lease.lease, lease.request, lease.payload) == (1, {"model": "gpt2-tiny"}, {"number": "0"})
    with pytest.raises(LeaseOver, match=rf"the dry run {asked.id} does not wait: it is leased, its search running"):
        pool.lease(asked)
    done = store.answer(asked.id, lease.lease, OK)
    assert (done.state, done.outcome) == (DryRunState.DONE, OK)
    assert store.outcome(asked.id) == OK


def test_an_answer_that_is_told_again_changes_nothing(store, pool):
    lease = pool.lease(pool.ask())
    first = store.answer(lease.dry_run, lease.lease, OK)
    assert store.answer(lease.dry_run, lease.lease, {"status": "oom"}) == first


def test_a_lease_that_ends_is_taken_up_and_the_old_one_is_refused(store, pool, clock):
    asked = pool.ask()
    old = pool.lease(asked, seconds=10)
    clock.pass_by(9)
    assert store.expire() == []
    clock.pass_by(2)
    assert [each.id for each in store.expire()] == [asked.id]
    new = pool.lease(asked)
    assert new.lease == old.lease + 1
    for late in (
        lambda: store.answer(asked.id, old.lease, {"status": "oom"}),
        lambda: store.renew(asked.id, old.lease, 10),
        lambda: store.give_back(asked.id, old.lease),
    ):
        with pytest.raises(
            LeaseOver, match=rf"lease 1 of the dry run {asked.id} is over: it is leased with the lease 2"
        ):
            late()
    assert store.answer(asked.id, new.lease, OK).outcome == OK


def test_a_late_answer_counts_if_no_other_worker_has_started(store, pool, clock):
    lease = pool.lease(pool.ask(), seconds=10)
    clock.pass_by(60)
    store.expire()
    assert store.answer(lease.dry_run, lease.lease, OK).outcome == OK
    assert store.waiting() == []


def test_a_renewed_lease_continues(store, pool, clock):
    lease = pool.lease(pool.ask(), seconds=10)
    for _ in range(5):
        clock.pass_by(8)
        assert store.renew(lease.dry_run, lease.lease, 10) == clock.now + 10
        assert store.expire() == []
    clock.pass_by(60)
    store.expire()
    store.renew(lease.dry_run, lease.lease, 10)  # no other worker has it yet
    assert store.dry_run(lease.dry_run).state == DryRunState.LEASED
    assert store.waiting() == []


def test_a_dry_run_that_keeps_losing_workers_is_a_crash(store, pool, clock):
    asked = pool.ask()
    for _ in range(MOST_ATTEMPTS):
        last = pool.lease(asked, seconds=10, worker=pool.join())
        clock.pass_by(11)
        store.expire()
    lost = store.outcome(asked.id)
    assert lost["status"] == "crash" and lost["reason"].startswith("3 workers were lost while they ran it")
    with pytest.raises(LeaseOver):
        store.answer(asked.id, last.lease, OK)
    assert store.outcome(asked.id) == lost


def test_workers_that_are_lost_with_their_server_are_not_the_dry_run_s_fault(store, pool, clock):
    asked = pool.ask()
    for _ in range(MOST_ATTEMPTS + 2):
        pool.lease(asked, seconds=10)
        clock.pass_by(60)  # neither server nor worker was running
        store.expire(renewed_after=clock.now + 10)
    assert (store.dry_run(asked.id).state, store.dry_run(asked.id).attempts) == (DryRunState.WAITING, 0)
    for _ in range(MOST_ATTEMPTS):  # these are lost while the server is running
        lease = pool.lease(asked, seconds=10, worker=pool.join())
        store.renew(asked.id, lease.lease, 10)
        clock.pass_by(11)
        store.expire(renewed_after=clock.now - 11)
    assert store.outcome(asked.id)["reason"].startswith("3 workers were lost while they ran it")


def test_a_worker_that_is_silent_now_and_then_is_not_lost(store, pool, clock):
    """A dry run is not marked as crashed when a busy machine renews its leases too late."""
    asked = pool.ask()
    for _ in range(MOST_ATTEMPTS + 2):
        lease = pool.lease(asked, seconds=10)
        clock.pass_by(11)
        store.expire()
    assert (store.dry_run(asked.id).state, store.dry_run(asked.id).attempts) == (DryRunState.WAITING, 1)
    assert store.answer(asked.id, lease.lease, OK).outcome == OK


def test_a_worker_that_is_lost_with_several_dry_runs_is_no_single_one_s_fault(store, pool, clock):
    """The loss counts for none of the dry runs, even if their leases expire a moment apart, as they were taken."""
    one, two = pool.ask("1"), pool.ask("2")
    for _ in range(MOST_ATTEMPTS + 1):
        pool.lease(one, seconds=10)
        clock.pass_by(1.5)
        pool.lease(two, seconds=10)
        clock.pass_by(9)
        assert [each.id for each in store.expire(overdue_s=5)] == [one.id, two.id]
    assert [store.dry_run(each.id).attempts for each in (one, two)] == [0, 0]


def test_a_lease_that_is_renewed_does_not_end_with_another_of_its_worker(store, pool, clock):
    one, two = pool.ask("1"), pool.ask("2")
    pool.lease(one, seconds=10)
    lease = pool.lease(two, seconds=10)
    clock.pass_by(9)
    store.renew(two.id, lease.lease, 10)
    clock.pass_by(2)
    assert [each.id for each in store.expire(overdue_s=5)] == [one.id]
    assert (store.dry_run(one.id).attempts, store.dry_run(two.id).state) == (1, DryRunState.LEASED)


def test_a_dry_run_that_keeps_killing_the_server_is_a_crash(store, pool, clock):
    asked = pool.ask()
    for number in range(FORGIVEN + MOST_ATTEMPTS):
        assert store.outcome(asked.id) is None, number
        pool.lease(asked, seconds=10)
        clock.pass_by(60)
        store.expire(renewed_after=clock.now + 10)
    assert store.outcome(asked.id)["status"] == "crash"


def test_a_returned_dry_run_does_not_count_as_lost(store, pool):
    asked = pool.ask()
    for _ in range(MOST_ATTEMPTS + 2):
        lease = pool.lease(asked)
        store.give_back(asked.id, lease.lease)
    assert (store.dry_run(asked.id).state, store.dry_run(asked.id).attempts) == (DryRunState.WAITING, 0)


def test_a_late_heartbeat_does_not_renew_a_returned_lease(store, pool):
    lease = pool.lease(pool.ask())
    store.give_back(lease.dry_run, lease.lease)
    with pytest.raises(LeaseOver, match="was given back"):
        store.renew(lease.dry_run, lease.lease, 10)
    store.leave(pool.worker.id)
    found = store.dry_run(lease.dry_run)
    assert (found.state, found.attempts) == (DryRunState.WAITING, 0)


def test_a_worker_that_leaves_gives_back_what_it_has(store, pool):
    asked = pool.ask()
    old = pool.lease(asked)
    store.leave(pool.worker.id)
    assert [each.dry_run for each in store.waiting()] == [asked.id]
    assert store.workers() == []
    with pytest.raises(Refused, match="has left"):
        pool.lease(asked)
    new = pool.lease(asked, worker=pool.join())
    with pytest.raises(LeaseOver):
        store.answer(asked.id, old.lease, OK)
    assert store.dry_run(asked.id).attempts == 1
    store.answer(asked.id, new.lease, OK)


def test_the_same_key_is_the_same_dry_run_with_its_outcome(store, pool):
    asked = pool.ask("7")
    lease = pool.lease(asked)
    store.answer(asked.id, lease.lease, OK)
    again = store.ask_dry_run(pool.search.id, store.take_search(pool.search.id), "7", "run", {"other": 1}, 1)
    assert (again.id, again.outcome, again.payload) == (asked.id, OK, {"number": "7"})


def test_dry_runs_of_an_ended_search_are_withdrawn_and_can_be_requested_again(store, pool):
    done, asked = pool.lease(pool.ask("0")), pool.ask("1")
    store.answer(done.dry_run, done.lease, OK)
    lease = pool.lease(asked)
    store.cancel(pool.search.id)
    assert store.outcome(done.dry_run) == OK, "a finished one stays"
    with pytest.raises(LeaseOver, match="withdrawn"):
        store.outcome(asked.id)
    with pytest.raises(LeaseOver):
        store.renew(asked.id, lease.lease, 10)
    with pytest.raises(LeaseOver):
        store.answer(asked.id, lease.lease, OK)
    store.retry(pool.search.id)
    pool.attempt = store.take_search(pool.search.id)
    again = pool.ask("1")
    assert (again.id, again.state) == (asked.id, DryRunState.WAITING)
    assert pool.lease(again).lease > lease.lease


def test_no_worker_gets_more_than_it_has(store, pool):
    pool.lease(pool.ask("0"))
    gang = pool.ask("1", devices=2)
    with pytest.raises(Refused, match=r"has 1 of 2 devices free, not 2"):
        pool.lease(gang)
    store.answer(store.running()[0].dry_run, 1, OK)
    pool.lease(gang)


def test_a_search_stays_on_the_kind_of_device_that_it_was_placed_on(store, pool):
    """The search plans for that kind; a worker with another kind is refused although it fits the request."""
    asked, other = pool.ask("0"), pool.join(name="NVIDIA A100")
    with pytest.raises(Refused, match="needs 'NVIDIA H100', but the worker .* has 'NVIDIA A100'"):
        pool.lease(asked, worker=other)
    assert pool.lease(asked).lease == 1


def test_a_search_is_not_put_back_while_a_worker_has_something_of_it(store, pool):
    lease = pool.lease(pool.ask("0"))
    assert not store.put_back(pool.search.id, "its user is over")
    store.answer(lease.dry_run, lease.lease, OK)
    waits = pool.ask("1")
    assert store.put_back(pool.search.id, "its user is over")
    assert store.search(pool.search.id).state == "queued"
    assert store.waiting() == [], "what it asked for waits with it"
    with pytest.raises(LeaseOver):
        pool.lease(waits)
    store.take_search(pool.search.id)
    assert [each.dry_run for each in store.waiting()] == [waits.id]


def test_an_earlier_attempt_at_a_search_may_write_nothing(store, pool):
    later = store.take_search(pool.search.id)
    for late in (
        lambda: pool.ask(),
        lambda: store.attempted_search(pool.search.id, pool.attempt),
        lambda: store.finish(pool.search.id, pool.attempt, "done"),
        lambda: store.tell_trial(pool.search.id, pool.attempt, 1, {"trial": 0}),
        lambda: store.add_event(pool.search.id, "said", {}, pool.attempt),
    ):
        with pytest.raises(AttemptOver, match=rf"attempt 1 at the search {pool.search.id} is over: the latest is 2"):
            late()
    assert store.finish(pool.search.id, later, "done").state == "done"
    with pytest.raises(AttemptOver, match="has ended: it is done"):
        store.take_search(pool.search.id)


def test_the_earlier_attempt_at_a_search_that_returned_to_the_queue_may_not_end_it(store, pool):
    """Regression: its searcher, which was still ending, cancelled the search that a user had retried."""
    for return_it in (
        lambda: store.retry(store.cancel(pool.search.id).id),
        lambda: store.put_back(pool.search.id, "its user is over"),
    ):
        attempt = store.take_search(pool.search.id)
        return_it()
        for state in ("cancelled", "failed", "done"):
            with pytest.raises(AttemptOver):
                store.finish(pool.search.id, attempt, state)
        assert store.search(pool.search.id).state == "queued"


def test_a_cancelled_search_stops_what_runs_and_stays_cancelled(store, pool):
    running, waiting = pool.ask("0"), pool.ask("1")
    lease = pool.lease(running)
    assert store.cancel(pool.search.id).state == "cancelled"
    assert store.waiting() == [] and store.running() == []
    with pytest.raises(LeaseOver):
        store.renew(running.id, lease.lease, 10)
    with pytest.raises(AttemptOver, match="is cancelled"):
        pool.ask("2")
    with pytest.raises(LeaseOver):
        pool.lease(waiting)
    assert store.attempted_search(pool.search.id, pool.attempt).state == "cancelled"
    ended = store.finish(pool.search.id, pool.attempt, "failed", "killed", best={"throughput": 3.0})
    assert (ended.state, ended.best) == ("cancelled", {"throughput": 3.0})
    assert store.cancel(pool.search.id) == ended


def test_unknown_ones_are_told_as_such(store, pool):
    for call in (
        lambda: store.outcome(99),
        lambda: store.lease(99, pool.worker.id, 1),
        lambda: store.answer(99, 1, OK),
    ):
        with pytest.raises(NotFound, match="there is no dry run 99"):
            call()
    with pytest.raises(NotFound, match="there is no worker 'nobody'"):
        store.lease(pool.ask().id, "nobody", 1)
    with pytest.raises(NotFound, match="there is no search 'none'"):
        store.ask_dry_run("none", 1, "0", "run", {}, 1)


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"loss": float("inf")}, {"loss": object()}])
def test_outcomes_that_are_not_json_are_refused(store, pool, bad):
    lease = pool.lease(pool.ask())
    with pytest.raises(UsageError, match="this cannot be stored"):
        store.answer(lease.dry_run, lease.lease, bad)
    assert store.outcome(lease.dry_run) is None
    store.answer(lease.dry_run, lease.lease, OK)


def test_the_share_of_a_user_is_what_their_dry_runs_had_of_devices(store, pool, clock):
    lease = pool.lease(pool.ask(devices=2), seconds=1e6)
    clock.pass_by(1800)
    (share,) = store.shares()
    assert store.usage() == {pool.user.id: pytest.approx(3600)}
    # 2 devices for half of the window of an hour. The weight falls with age: from 1 to 1/2.
    assert share.recent == pytest.approx(2 * 1800 * 0.75)
    assert share.used_hours == pytest.approx(1.0)
    store.answer(lease.dry_run, lease.lease, OK)
    clock.pass_by(1800)
    (share,) = store.shares()
    assert share.recent == pytest.approx(2 * 1800 * 0.25)
    clock.pass_by(3600)
    assert store.shares()[0].recent == 0
    assert store.usage() == {pool.user.id: pytest.approx(3600)}
    clock.pass_by(31 * 86400)
    assert store.usage() == {}
    assert store.waiting() == []
    pool.ask("1")
    assert store.waiting()[0].seconds == pytest.approx(1800)


def test_a_withdrawn_dry_run_that_waited_after_a_lost_lease_is_not_charged(store, pool, clock):
    """Regression: the time from its lost lease to its end counted as use of the devices."""
    pool.lease(pool.ask(devices=2), seconds=10)
    clock.pass_by(11)
    store.expire()
    clock.pass_by(1800)
    store.cancel(pool.search.id)
    clock.pass_by(1)
    assert [each.recent for each in store.shares() if each.user == pool.user.id] == [0.0]


def test_a_dry_run_that_a_worker_refused_is_run_again_when_it_is_asked_for_again(store, pool):
    lease = pool.lease(pool.ask())
    store.answer(lease.dry_run, lease.lease, {"refused": "timm is not installed"})
    assert store.outcome(lease.dry_run) == {"refused": "timm is not installed"}
    again = pool.ask()
    assert (again.id, again.state, store.outcome(again.id)) == (lease.dry_run, DryRunState.WAITING, None)
    with pytest.raises(LeaseOver):
        store.answer(lease.dry_run, lease.lease, OK)
    second = pool.lease(again)
    store.answer(again.id, second.lease, OK)
    assert pool.ask().id == again.id and store.outcome(again.id) == OK
