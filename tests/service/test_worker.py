"""A worker runs, answers and gives back the dry runs that it leases; it waits for a pool that cannot be reached."""

import contextlib
import shutil
import threading
import time

import pytest
from pools import PLACED, a_store, measured
from processes import until
from redline.base.errors import MissingDependency, Refused, RunnerError, ServiceError, StorageUnavailable, UsageError
from redline.results import Measurement, Status
from redline.runners import Runner
from redline.service import worker as work
from redline.service.logs import read_log
from redline.service.records import DryRunState
from redline.service.worker import Worker
from service_pool import begun
from store_pool import StorePool

LEASE_S = 2.0


class Formula(Runner):
    """Runs a configuration by a formula and prints a line."""

    name = "formula"

    def __init__(self):
        self.begun, self.go_on, self.stopped = threading.Event(), threading.Event(), []
        self.go_on.set()
        self.raises = None

    def run(self, request):
        self.begun.set()
        request.log.write_text(f"{request.config['micro_batch']} at once\n")
        self.go_on.wait()
        if self.raises is not None:
            raise self.raises
        return Measurement.from_dict(measured({"requests": [request.to_dict()], "memory_limit_mib": 1000.0}))


class Warm:
    """Replaces `WarmRunners`: one runner for all."""

    def __init__(self, runner):
        self._runner = runner
        self.closed = False

    @contextlib.contextmanager
    def runner(self, assignment):
        yield self._runner

    def check(self):
        return

    def stop(self, assignment, log):
        self._runner.stopped.append(log.name)
        self._runner.go_on.set()

    def close(self):
        self.closed = True
        self._runner.go_on.set()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A store with a submitted search. Workers' intervals are short."""
    for name, seconds in (("RENEW_S", 0.2), ("WAIT_S", 0.3), ("RETRY_S", 0.05), ("LOG_S", 0.1)):
        monkeypatch.setattr(work, name, seconds)
    store, user = a_store(tmp_path)
    with store:
        store.ann, store.data = user, tmp_path
        search = store.submit(user, {"target": "gpt2-tiny"}, devices=1)[0].id
        store.sought, store.attempt = search, begun(store, search, PLACED.device.name)
        yield store


@contextlib.contextmanager
def working(store, runner, pool=None, warm=Warm):
    """Runs a worker in a thread."""
    pool = pool or StorePool(store, user=store.ann, data=store.data, lease_s=LEASE_S)
    worker = Worker(
        pool,
        name="w",
        host="here",
        devices=2,
        describe=lambda devices: (PLACED.device.to_dict(), 1000),
        warm=lambda *what, **more: warm(runner),
    )
    worker.trouble = None

    def run():
        try:
            worker.run()
        except RunnerError as error:
            worker.trouble = error

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(30.0)
        assert not thread.is_alive()


def asked(store, number=0):
    request = {"config": {"micro_batch": 2, "checkpoint_ratio": 0.0}, "number": number, "log": f"{number}.log"}
    request |= {"timeout_s": None, "best_throughput": None, "reference": None, "soak": None}
    payload = {"requests": [request], "memory_limit_mib": 1000.0}
    return store.ask_dry_run(store.sought, store.attempt, f"trial-{number}", "run", payload, 1).id


def test_an_assigned_dry_run_runs_and_its_log_is_stored(place):
    with working(place, Formula()):
        dry_run = asked(place)
        outcome = until(lambda: place.outcome(dry_run))
    assert Measurement.from_dict(outcome).throughput == pytest.approx(100 * 2**0.5)
    assert read_log(place.data, place.sought, "0.log") == (b"2 at once\n", 10)
    assert place.workers() == []


def test_a_lease_lasts_as_long_as_the_dry_run(place):
    runner = Formula()
    runner.go_on.clear()
    with working(place, runner):
        dry_run = asked(place)
        until(runner.begun.is_set)
        time.sleep(1.5 * LEASE_S)
        assert place.expire() == []
        runner.go_on.set()
        until(lambda: place.outcome(dry_run))
    assert place.dry_run(dry_run).attempts == 1


def test_a_withdrawn_dry_run_is_ended(place):
    runner = Formula()
    runner.go_on.clear()
    with working(place, runner):
        dry_run = asked(place)
        until(runner.begun.is_set)
        place.cancel(place.sought)
        until(lambda: runner.stopped)
    assert runner.stopped == ["0.log"]
    assert place.dry_run(dry_run).state is DryRunState.WITHDRAWN


def test_a_stopping_worker_returns_its_dry_runs_without_a_loss(place):
    runner = Formula()
    runner.go_on.clear()
    runner.raises = RunnerError("closed during a trial")
    with working(place, runner):
        dry_run = asked(place)
        until(runner.begun.is_set)
    found = place.dry_run(dry_run)
    assert (found.state, found.attempts) == (DryRunState.WAITING, 0)


def test_invalid_assignments_are_refused_with_a_message(place):
    runner = Formula()
    runner.raises = UsageError("there is no model gpt7")
    with working(place, runner):
        dry_run = asked(place)
        assert until(lambda: place.outcome(dry_run)) == {"refused": "there is no model gpt7"}


def test_machinery_that_always_fails_ends_as_a_crash(place):
    runner = Formula()
    runner.raises = RunnerError("the agent died")
    with working(place, runner):
        dry_run = asked(place)
        found = until(lambda: place.outcome(dry_run))
    assert found["status"] == Status.CRASH
    assert found["reason"] == "its runner was lost 3 times: the agent died"
    assert place.dry_run(dry_run).attempts == 1


def test_a_runner_lost_once_repeats_the_dry_run_with_a_new_log(place):
    class LostOnce(Formula):
        def run(self, request):
            if self.begun.is_set():
                return super().run(request)
            self.begun.set()
            request.log.write_text("what was printed before it was lost\n")
            time.sleep(0.3)  # the worker sends it meanwhile
            raise RunnerError("the agent died")

    with working(place, LostOnce()):
        dry_run = asked(place)
        outcome = until(lambda: place.outcome(dry_run))
    assert outcome["status"] == Status.OK
    assert (place.dry_run(dry_run).attempts, place.dry_run(dry_run).lease) == (1, 1)
    assert read_log(place.data, place.sought, "0.log")[0] == b"2 at once\n"


def test_a_worker_that_can_start_nothing_gives_back_what_it_has_and_ends_in_words(place):
    class Broken(Warm):
        @contextlib.contextmanager
        def runner(self, assignment):
            raise RunnerError("no Ray listens at h:1")
            yield

    with working(place, Formula(), warm=Broken) as worker:
        dry_run = asked(place)
        until(lambda: worker.trouble)
    assert str(worker.trouble) == "this worker ends, since no runner can be started: no Ray listens at h:1"
    found = place.dry_run(dry_run)
    assert (found.state, found.attempts) == (DryRunState.WAITING, 0)
    assert place.workers() == []


class UnreachablePool(StorePool):
    """A pool that fails every other call."""

    def __init__(self, *what, **more):
        super().__init__(*what, **more)
        self.times = 0

    def _reached(self):
        self.times += 1
        if self.times % 2:
            raise (StorageUnavailable, ConnectionError)[self.times % 4 == 1]("it is away")

    def join(self, *what):
        self._reached()
        return super().join(*what)

    def lease(self, *what):
        self._reached()
        return super().lease(*what)

    def renew(self, *what):
        self._reached()
        super().renew(*what)

    def answer(self, *what):
        self._reached()
        super().answer(*what)

    def log(self, *what):
        self._reached()
        super().log(*what)


def test_a_pool_that_is_away_is_waited_for(place):
    pool = UnreachablePool(place, user=place.ann, data=place.data, lease_s=30.0)
    with working(place, Formula(), pool):
        dry_runs = [asked(place, number) for number in range(3)]
        outcomes = [until(lambda each=each: place.outcome(each)) for each in dry_runs]
    assert [each["status"] for each in outcomes] == ["ok"] * 3
    assert [place.dry_run(each).attempts for each in dry_runs] == [1, 1, 1]


def test_a_missing_package_refuses_a_dry_run_and_an_unexpected_error_is_its_crash(place, caplog):
    """Regression: both ended the thread, and its lease was renewed for ever."""
    runner = Formula()
    with working(place, runner):
        runner.raises = MissingDependency("timm is not installed")
        missing = asked(place)
        assert until(lambda: place.outcome(missing)) == {"refused": "timm is not installed"}
        runner.raises = KeyError("hidden_size")
        broken = asked(place, 1)
        found = until(lambda: place.outcome(broken))
    assert (found["status"], found["reason"]) == (Status.CRASH, "its worker failed: KeyError: 'hidden_size'")
    assert "in run\n    raise self.raises" in caplog.text


def test_a_worker_without_room_for_logs_gives_back_what_it_has_and_ends(place):
    with working(place, Formula()) as worker:
        until(place.workers)
        shutil.rmtree(worker._folder)
        dry_run = asked(place)
        until(lambda: worker.trouble)
    assert "No such file" in str(worker.trouble)
    assert (place.dry_run(dry_run).state, place.dry_run(dry_run).attempts) == (DryRunState.WAITING, 0)


class RejectingPool(StorePool):
    """A pool that raises `error` for the calls named in `rejected`, and records all calls."""

    error, rejected = ServiceError("the server answered 500"), ()

    def __init__(self, *what, **more):
        super().__init__(*what, **more)
        self.calls = []

    def _called(self, name):
        self.calls.append(name)
        if name in self.rejected:
            raise self.error

    def join(self, *what):
        self._called("join")
        return super().join(*what)

    def renew(self, *what):
        self._called("renew")
        super().renew(*what)

    def answer(self, *what):
        self._called("answer")
        super().answer(*what)


@pytest.mark.parametrize("error", [ServiceError("the server answered 500"), Refused("the token is unknown")])
def test_a_lease_whose_answer_is_rejected_is_not_renewed_any_more(place, error):
    pool = RejectingPool(place, user=place.ann, data=place.data, lease_s=30.0)
    pool.error, pool.rejected = error, ("answer",)
    with working(place, Formula(), pool) as worker:
        asked(place)
        until(lambda: "answer" in pool.calls and not worker._leases and not list(worker._folder.glob("*-1")))
    assert pool.calls.count("answer") == 1


@pytest.mark.parametrize("error", [ServiceError("the server answered 500"), UsageError("invalid")])
def test_leases_are_renewed_after_a_rejected_renewal(place, error):
    pool, runner = RejectingPool(place, user=place.ann, data=place.data, lease_s=30.0), Formula()
    pool.error, pool.rejected = error, ("renew",)
    runner.go_on.clear()
    with working(place, runner, pool):
        asked(place)
        until(lambda: pool.calls.count("renew") > 2)


def test_a_worker_whose_token_is_refused_ends(place):
    """Regression: `Refused` is an `OSError`, and the worker retried for ever."""
    pool = RejectingPool(place, user=place.ann, data=place.data, lease_s=30.0)
    pool.error, pool.rejected = Refused("the token is unknown"), ("join",)
    worker = Worker(
        pool,
        name="w",
        host="here",
        devices=1,
        describe=lambda devices: ({}, 1),
        warm=lambda *what, **more: Warm(Formula()),
    )
    with pytest.raises(Refused, match="the token is unknown"):
        worker.run()
