"""The dispatcher: a worker that asks gets a dry run, leased to it; a worker that has stopped waiting gets nothing."""

import threading

import pytest
from redline.base.errors import StorageUnavailable
from redline.service.dispatcher import Dispatcher
from redline.service.records import DryRunState
from redline.service.store import Store
from service_pool import Pool


@pytest.fixture
def pool(sqlite):
    return Pool(sqlite)


@pytest.fixture
def dispatcher(sqlite, clock):
    """A dispatcher that decides only when `step` is called, by the store's clock."""
    return Dispatcher(sqlite, lease_s=10, monotonic=clock)


def test_a_worker_gets_a_waiting_dry_run(dispatcher, pool, clock):
    asked = dispatcher.ask(pool.worker.id)
    assert dispatcher.step() == []
    dry_run = pool.ask()
    (given,) = dispatcher.step()
    assert (asked.result(0), given.dry_run, given.until) == (given, dry_run.id, clock.now + 10)
    assert [each.dry_run for each in pool.store.running()] == [dry_run.id]


def test_a_worker_that_stopped_waiting_gets_nothing(dispatcher, pool):
    dispatcher.ask(pool.worker.id).cancel()
    dry_run = pool.ask()
    assert dispatcher.step() == []
    assert pool.store.dry_run(dry_run.id).state == DryRunState.WAITING


def test_a_disconnect_during_the_decision_leaves_the_dry_run_to_others(dispatcher, pool, monkeypatch):
    future, dry_run = dispatcher.ask(pool.worker.id), pool.ask()

    def hangs_up(*_):
        assert future.cancel()
        return [(dry_run.id, pool.worker.id)]

    monkeypatch.setattr("redline.service.dispatcher.decide", hangs_up)
    assert dispatcher.step() == []
    assert pool.store.dry_run(dry_run.id).lease == 0


def test_a_worker_gets_one_for_each_time_it_asks(dispatcher, pool):
    for key in "012":
        pool.ask(key)
    one, two = dispatcher.ask(pool.worker.id), dispatcher.ask(pool.worker.id)
    assert len(dispatcher.step()) == 2
    assert {one.result(0).payload["number"], two.result(0).payload["number"]} == {"0", "1"}


def test_a_worker_that_asks_no_more_is_not_waited_for(dispatcher, pool, clock):
    """The dry run goes to the worker that asks, although the silent one would fit better."""
    silent, asking = pool.worker, pool.join(devices=8)
    dispatcher.ask(silent.id).cancel()
    clock.pass_by(3)
    future = dispatcher.ask(asking.id)
    pool.ask(devices=2)
    assert [each.worker for each in dispatcher.step()] == [asking.id]
    assert future.done()


def test_leases_are_not_ended_before_their_workers_could_renew_them_after_a_start(dispatcher, pool, clock):
    lease = pool.lease(pool.ask(), seconds=10)
    clock.pass_by(60)  # no server was running
    again = Dispatcher(pool.store, lease_s=10, monotonic=clock)
    again.step()
    assert pool.store.dry_run(lease.dry_run).state == DryRunState.LEASED
    pool.store.renew(lease.dry_run, lease.lease, 10)
    clock.pass_by(10.5)
    again.step()
    assert pool.store.dry_run(lease.dry_run).state == DryRunState.WAITING


def test_losses_with_an_earlier_server_do_not_count(dispatcher, pool, clock):
    asked = pool.ask()
    for _ in range(5):
        pool.lease(asked, seconds=10, worker=pool.join())
        clock.pass_by(60)  # the server is killed, and its worker with it
        again = Dispatcher(pool.store, lease_s=10, monotonic=clock)
        clock.pass_by(10.5)
        again.step()
        assert pool.store.dry_run(asked.id).attempts == 0
    pool.lease(asked, seconds=10, worker=pool.join())
    clock.pass_by(10.5)
    again.step()  # this dispatcher was running when the lease expired
    assert pool.store.dry_run(asked.id).attempts == 1


def test_a_dry_run_cancelled_during_the_decision_is_not_assigned(dispatcher, pool, monkeypatch):
    future = dispatcher.ask(pool.worker.id)
    pool.ask()
    waiting = pool.store.waiting()
    pool.store.cancel(pool.search.id)
    monkeypatch.setattr(pool.store, "waiting", lambda: waiting)
    assert dispatcher.step() == []
    assert future.result(0) is None  # the worker asks again


def test_why_searches_wait_is_known(dispatcher, pool):
    dispatcher.ask(pool.worker.id)
    pool.ask(devices=4)
    dispatcher.step()
    assert dispatcher.reasons == {pool.search.id: "a dry run takes 4 devices of one worker, and none has more than 2"}


def test_the_dispatcher_notices_requests_of_other_processes(sqlite_url):
    with Store.open(sqlite_url) as store, Store.open(sqlite_url) as other:
        pool, dispatcher = Pool(other), Dispatcher(store)
        dispatcher.start()
        got = []

        def work():
            while (assignment := dispatcher.ask(pool.worker.id).result(30)) is not None:
                other.answer(assignment.dry_run, assignment.lease, {"number": assignment.payload["number"]})
                got.append(assignment.dry_run)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for each in threads:
            each.start()
        asked = [pool.ask(str(number)).id for number in range(20)]
        while len(got) < 20:
            threading.Event().wait(0.01)
        assert not dispatcher.ask("nobody").done()
        dispatcher.close()
        for each in threads:
            each.join()
        assert sorted(got) == asked
        assert [other.outcome(each) for each in asked] == [{"number": str(number)} for number in range(20)]


def test_a_database_that_is_away_is_waited_for(sqlite_url, monkeypatch):
    with Store.open(sqlite_url) as store:
        pool, dispatcher = Pool(store), Dispatcher(store)
        latest, failing = store.latest, threading.Event()

        def away():
            if failing.is_set():
                raise StorageUnavailable("the database is away")
            return latest()

        failing.set()
        monkeypatch.setattr(store, "latest", away)
        dispatcher.start()
        asked = dispatcher.ask(pool.worker.id)
        while not dispatcher.failure:
            threading.Event().wait(0.01)
        assert dispatcher.failure == "the database is away"
        pool.ask()
        failing.clear()
        assert asked.result(60).payload == {"number": "0"}
        dispatcher.close()
        assert dispatcher.failure == ""


def test_an_unexpected_error_is_logged_and_the_next_decision_leases(sqlite_url, monkeypatch, caplog):
    with Store.open(sqlite_url) as store:
        pool, dispatcher = Pool(store), Dispatcher(store)
        step, errors = dispatcher.step, [KeyError("w")]
        monkeypatch.setattr(dispatcher, "step", lambda: (_ for _ in ()).throw(errors.pop()) if errors else step())
        pool.ask()
        dispatcher.start()
        assert dispatcher.ask(pool.worker.id).result(60).payload == {"number": "0"}
        dispatcher.close()
    assert "KeyError: 'w'" in caplog.text


def test_after_an_outage_workers_have_time_to_renew_their_leases(sqlite_url, monkeypatch, clock):
    with Store.open(sqlite_url, clock=clock) as store:
        pool = Pool(store)
        dispatcher = Dispatcher(store, lease_s=10, monotonic=clock)
        lease = pool.lease(pool.ask(), seconds=10)
        clock.pass_by(60)
        steps, away, seen = [], [True], threading.Event()
        real = store.latest

        def latest():
            if away[0]:
                seen.set()
                raise StorageUnavailable("the database is away")
            return real()

        monkeypatch.setattr(store, "latest", latest)
        stepped = threading.Event()
        step = dispatcher.step

        def counted():
            step()
            steps.append(store.dry_run(lease.dry_run).state)
            stepped.set()

        monkeypatch.setattr(dispatcher, "step", counted)
        dispatcher.start()
        assert seen.wait(10)
        away[0] = False
        dispatcher.wake()
        assert stepped.wait(10)
        dispatcher.close()
        assert set(steps) == {DryRunState.LEASED}
