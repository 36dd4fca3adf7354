"""A search on the pool keeps its results when searchers or workers die."""

import json
import threading

import pytest
from pools import Hands, Killed, a_runner, a_store, a_whole_search, speed
from redline.base.errors import RunnerError, UsageError
from redline.results import Measurement, Status
from redline.results.probe import Computed, Probe
from redline.runners import TrialRequest
from redline.runners.runner import Reference
from redline.runners.soak import SoakPlan
from redline.space import Config

REQUEST = {"target": "gpt2-tiny"}


@pytest.fixture
def store(tmp_path):
    made, user = a_store(tmp_path)
    with made:
        made.ann = user
        yield made


def a_search(store, **more):
    return store.submit(store.ann, REQUEST, devices=1, **more)[0].id


def a_request(number=0, name=None, **config):
    from pathlib import Path

    return TrialRequest(
        config=Config({"micro_batch": 2, "checkpoint_ratio": 0.5, **config}),
        number=number,
        log=Path(name or f"{number}.log"),
    )


def refused(function, kind=RunnerError):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_requests_round_trip_through_json(tmp_path):
    computed = Computed(loss=1.1, gradient=float("nan"), blocks=(0.1, 2e-30), samples=4)
    probe = Probe(quiet=computed, logits=(1 / 3,), roundoff=2**-24, loss_roundoff=2**-24)
    request = TrialRequest(
        config=Config({"micro_batch": 4, "precision": "bf16", "fusion": True}),
        number=7,
        log=tmp_path / "7.soak.log",
        timeout_s=300.0,
        best_throughput=1234.5678901234567,
        reference=Reference(probe=probe, config_id="abc"),
        soak=SoakPlan(steps=3, compiling_s=1.5),
    )
    back = TrialRequest.from_dict(json.loads(json.dumps(request.to_dict(), allow_nan=False)), tmp_path)
    assert back.config.id == request.config.id
    assert repr(back) == repr(request)  # nan is not equal to itself


@pytest.mark.parametrize("name", ["../7.log", "/etc/7.log", "7.log\n", "7.AGAIN.log", "seven.log", 7])
def test_a_log_of_another_name_is_refused(tmp_path, name):
    data = {**a_request(7).to_dict(), "log": name}
    with pytest.raises(UsageError):
        TrialRequest.from_dict(data, tmp_path)


def test_a_request_that_lacks_something_is_refused_in_words():
    assert "KeyError 'config'" in refused(
        lambda: TrialRequest.from_dict({"log": None, "reference": None, "soak": None}), UsageError
    )


def test_a_trial_is_run_once_whoever_asks_for_it(store):
    search = a_search(store)
    with Hands(store, store.ann) as hands:
        first = a_runner(store, search).run(a_request(3))
        again = a_runner(store, search).run(a_request(3))
    assert first == again
    assert first.throughput == speed({"micro_batch": 2, "checkpoint_ratio": 0.5})
    assert hands.ran == {"trial-3": 1}


def test_measuring_again_is_another_dry_run_each_time_and_the_same_to_who_takes_it_up(store):
    search, finished = a_search(store), 4
    again = a_request(3, "3.again.log")
    with Hands(store, store.ann) as hands:
        runner = a_runner(store, search, finished=lambda: finished)
        runner.run(again), runner.run(again)
        taken_up = a_runner(store, search, finished=lambda: finished)
        taken_up.run(again)
        assert hands.ran == {"3.again@4-1": 1, "3.again@4-2": 1}
        finished = 5
        taken_up.run(again)
    assert hands.ran == {"3.again@4-1": 1, "3.again@4-2": 1, "3.again@5-1": 1}


def test_an_earlier_attempt_asks_for_nothing_any_more(monkeypatch, store):
    monkeypatch.setattr("redline.service.pool_runner.CANCELLED_S", 0.1)
    search = a_search(store)
    earlier = a_runner(store, search)
    a_runner(store, search)
    assert "attempt 1" in refused(lambda: earlier.run(a_request()), RunnerError)


def test_waiting_dry_runs_stay_at_the_end_and_are_requested_once(store):
    search = a_search(store)
    runner = a_runner(store, search)
    threading.Timer(0.2, runner.close).start()
    assert "the search ended" in refused(lambda: runner.run(a_request()))
    assert runner.closed
    with Hands(store, store.ann) as hands:
        assert a_runner(store, search).run(a_request()).ok
    assert hands.ran == {"trial-0": 1}


def test_a_worker_s_refusal_ends_the_search(store):
    with Hands(store, store.ann, lambda payload: {"refused": "there is no model gpt7"}):
        runner = a_runner(store, a_search(store))
        assert refused(lambda: runner.run(a_request()), UsageError) == "there is no model gpt7"


def test_a_dry_run_that_kills_its_workers_is_a_crash(store):
    now = [store.clock()]
    store.clock = lambda: now[0]
    runner, found = a_runner(store, a_search(store)), []
    thread = threading.Thread(target=lambda: found.append(runner.run(a_request())))
    thread.start()
    with Hands(store, store.ann, lambda payload: None) as hands:
        while not found:
            now[0] += 31.0
            store.expire()
            thread.join(0.05)
    assert found[0].status is Status.CRASH
    assert "3 workers were lost" in found[0].reason
    assert hands.ran == {"trial-0": 3}


def test_turns_come_back_as_they_were_measured(store):
    turns = [[Measurement(status=Status.OK, throughput=1.5)], [Measurement(status=Status.OOM, reason="full")]]
    search = a_search(store)
    with Hands(store, store.ann, lambda payload: {"turns": [[each.to_dict() for each in of] for of in turns]}) as hands:
        runner = a_runner(store, search)
        assert runner.take_turns([a_request(1), a_request(2)], [turns[0][0], turns[0][0]], 2.0) == turns
    assert hands.ran == {"turns-1.2@0-1": 1}
    [asked] = store.dry_runs(search)
    assert asked.payload["patience_s"] == 2.0
    assert asked.payload["alone"][0]["throughput"] == 1.5
    assert asked.payload["memory_limit_mib"] == 1000.0


def test_turns_that_are_lost_or_cannot_be_taken_are_none(store):
    with Hands(store, store.ann, lambda payload: {"turns": None}):
        assert a_runner(store, a_search(store)).take_turns([a_request(1)], [], 0.0) is None
    with Hands(store, store.ann, lambda payload: {"status": "crash", "reason": "lost"}):
        assert a_runner(store, a_search(store)).take_turns([a_request(1)], [], 0.0) is None


def test_a_search_survives_its_searcher_with_the_same_result(store, tmp_path):
    with Hands(store, store.ann) as hands:
        whole = a_search(store)
        expected = a_whole_search(store, whole, tmp_path / "whole")
        once = dict(hands.ran)
        hands.ran.clear()
        search = a_search(store)
        for after in (1, 4, 7):
            with pytest.raises(Killed):
                a_whole_search(store, search, tmp_path / "killed", killed_after=after)
        result = a_whole_search(store, search, tmp_path / "killed")
    assert set(hands.ran.values()) == {1}
    assert hands.ran == once
    assert [dict(each.config) for each in result.all_trials] == [dict(each.config) for each in expected.all_trials]
    assert [each.measured.status for each in result.all_trials] == [
        each.measured.status for each in expected.all_trials
    ]
    assert result.best.config == expected.best.config
    assert result.best.throughput == expected.best.throughput


def test_every_trial_is_reported_once_across_attempts(store, tmp_path):
    search = a_search(store)
    with Hands(store, store.ann):
        with pytest.raises(Killed):
            a_whole_search(store, search, tmp_path / "killed", killed_after=3)
        result = a_whole_search(store, search, tmp_path / "killed")
    finished = [each.data["trial"] for each in store.events(search=search) if each.kind == "finished"]
    assert finished == [each.number for each in result.all_trials]
