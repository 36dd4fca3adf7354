"""A runner that fails permanently ends a search without loss of its results."""

import csv

import pytest
import redline as rl
import yaml
from listeners import RecordingListener
from redline.base.errors import RunnerError
from redline.results import Measurement, Status
from redline.runners import Runner
from redline.tuner.runner_start import RunnerStart
from redline.tuner.search import ATTEMPTS


class Fails(Runner):
    """A runner that works for so many calls and then raises on every call."""

    name = "fails"

    def __init__(self, works):
        self._works, self.calls = works, 0

    def run(self, request):
        self.calls += 1
        if self.calls > self._works:
            raise RunnerError("the host agent was lost during a trial")
        return Measurement(status=Status.OK, throughput=float(request.config["x"]), seconds_total=1.0)

    def close(self):
        self.closed = True


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """Tunes with a runner that is lost after so many calls."""

    def tune(works, **options):
        space = rl.Space()
        space.choice("x", [1, 2, 3, 4, 5])
        made, listener = Fails(works), RecordingListener()
        monkeypatch.setattr(RunnerStart, "runner", lambda *_: made)
        with pytest.raises(RunnerError) as caught:
            rl.tune(lambda config: 0.0, space, sampler="grid", out=tmp_path / "run", listener=listener, **options)
        return made, listener, str(caught.value)

    return tune


def test_a_runner_lost_in_mid_search_leaves_the_best_so_far(lost, tmp_path):
    made, listener, messages = lost(3)
    assert made.calls == 3 + ATTEMPTS and made.closed
    rows = list(csv.DictReader(open(tmp_path / "run" / "trials.csv", newline="")))
    fastest = max(rows, key=lambda row: float(row["throughput"]))
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert len(rows) == 3
    assert best["best"]["configuration"]["x"] == int(fastest["knob.x"])
    assert "the host agent was lost" in messages and f"'{tmp_path / 'run'}'" in messages
    (result,) = listener.results
    assert (result.ended, result.interrupted) == ("the machinery that runs trials failed", False)


def test_the_run_is_closed_and_can_be_resumed(lost, tmp_path, monkeypatch):
    lost(3)
    space = rl.Space()
    space.choice("x", [1, 2, 3, 4, 5])
    monkeypatch.setattr(RunnerStart, "runner", lambda *_: Fails(1000))
    result = rl.tune(lambda config: 0.0, space, sampler="grid", out=tmp_path / "run", resume=True)
    assert sorted(trial.config["x"] for trial in result.all_trials) == [1, 2, 3, 4, 5]
    assert [trial.number for trial in result.all_trials] == list(range(5))


def test_a_runner_lost_while_leaders_are_measured_again_leaves_the_best_so_far(lost, tmp_path):
    made, *_ = lost(5)
    assert made.calls == 5 + ATTEMPTS
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["best"]["configuration"]["x"] == 5


def test_concurrent_results_are_kept_when_a_trial_is_lost(lost, tmp_path, monkeypatch):
    import threading

    together = threading.Barrier(2)

    def run(self, request):
        together.wait(30)
        if request.number == 0:
            raise RunnerError("lost a node")
        return Measurement(status=Status.OK, throughput=7.0)

    monkeypatch.setattr(Fails, "slots", 2, raising=False)
    monkeypatch.setattr(Fails, "run", run)
    monkeypatch.setattr(Fails, "closed", True)
    monkeypatch.setattr("redline.tuner.search.wait", lambda running, return_when: _all(running))
    lost(0)
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["best"]["trial"] == 1


def _all(running):
    import concurrent.futures

    return concurrent.futures.wait(running)
