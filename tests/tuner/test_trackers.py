"""`--log-to`: each tracker's records after a search, read back with its own tools."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import redline as rl
from redline.base.errors import MissingDependency, UsageError
from redline.results import Measurement, Status, Trial
from redline.tuner.listener import SearchListener, SearchPlan
from redline.tuner.result import make_result
from redline.tuner.trackers import TRACKERS, SearchTracking, Tracker, logging_to


def train(config):
    if config["micro_batch"] == 8:
        raise rl.OutOfMemory("too large")
    return 100.0 * config["micro_batch"] * (2 if config["fusion"] else 1)


def space():
    made = rl.Space()
    made.choice("micro_batch", [1, 2, 4, 8])
    made.flag("fusion")
    return made


def tuned(tmp_path, name):
    result = rl.tune(train, space(), trials=8, sampler="grid", out=tmp_path / "run", log_to=name, isolate=False)
    assert result.best.throughput == 800.0 and result.notes == ()
    return result, tmp_path / "run"


def test_tensorboard_holds_every_trial(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result, folder = tuned(tmp_path, "tensorboard")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    logged = {each.step: each.value for each in events.Scalars("trial/throughput")}
    assert logged == {each.number: each.measurement.throughput for each in result.all_trials if each.ok}
    assert [each.value for each in events.Scalars("best_so_far")][-1] == 800.0
    assert events.Scalars("result/best_throughput")[0].value == 800.0
    trials = [each for each in (folder / "tensorboard").iterdir() if each.is_dir()]
    assert len(trials) == len(result.all_trials)  # the HParams page has one run per trial


@pytest.mark.slow
def test_mlflow_holds_a_child_run_for_every_trial(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result, folder = tuned(tmp_path, ["mlflow"])
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("redline train")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [each for each in runs if "mlflow.parentRunId" not in each.data.tags]
    children = {each.info.run_name: each for each in runs if each is not parent}
    assert len(children) == len(result.all_trials)
    best = children[f"trial {result.best.trial.number}"]
    assert best.data.params == {"micro_batch": "4", "fusion": "True"}
    assert best.data.metrics["throughput"] == 800.0
    assert best.info.status == "FINISHED"
    (failed, _) = [each for each in children.values() if each.data.tags["redline.outcome"].startswith("oom: ")]
    assert failed.info.status == "FAILED" and "throughput" not in failed.data.metrics
    assert parent.data.metrics["best_throughput"] == 800.0
    assert parent.info.status == "FINISHED"
    history = client.get_metric_history(parent.info.run_id, "trial/throughput")
    assert len(history) == 6 and {each.step for each in history} == {
        each.number for each in result.all_trials if each.ok
    }


@pytest.mark.slow
def test_wandb_keeps_the_run_for_later(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    # A separate process: wandb starts a service that would outlive this test.
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import importlib.util as u\n"
        "s = u.spec_from_file_location('t', sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "from pathlib import Path\n"
        "m.tuned(Path('.'), 'wandb')\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    data = stored.read_bytes()
    # The records are protocol buffers, which contain texts verbatim.
    for word in (b"best_so_far", b"knob.micro_batch", b"best_throughput", b"oom"):
        assert word in data, word


PLAN = SearchPlan(name="m", where="cpu", valid=9, trials=8, seconds=None, sampler="random", runner="local")


class Recorder(Tracker):
    """A tracker that keeps its calls, one of which can be made to fail."""

    name = package = "json"  # a module that is there

    def __init__(self, folder, failing=""):
        super().__init__(folder)
        self.failing, self.calls = failing, []

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self.failing:
            raise OSError("no space left")

    def start(self, title, settings, runs):
        self._call("start", title)
        return "a run"

    def log(self, step, metrics):
        self._call("log", step, metrics)

    def trial(self, number, config, metrics, outcome):
        self._call("trial", number, config, outcome)

    def end(self, ended, results):
        self._call("end", ended)


def tracked(tmp_path, failing=""):
    """A recorder, its listener, and the messages to the user."""
    problems = []
    user = SearchListener()
    user.on_message = problems.append
    tracker = Recorder(tmp_path, failing)
    return tracker, SearchTracking([tracker], user), problems


def a_trial():
    measured = Measurement(status=Status.OK, throughput=2.0, loss=float("nan"), step_ms=3.0)
    return Trial(number=0, config={"micro_batch": 1}, measurement=measured, predicted_throughput=4.0)


@pytest.mark.parametrize("failing", ["start", "trial", "log", "end"])
def test_a_tracker_that_fails_is_named_once_and_ends_nothing(tmp_path, failing):
    tracker, tracking, problems = tracked(tmp_path, failing)
    tracking.on_start(PLAN)
    tracking.on_trial_end(a_trial())
    tracking.on_trial_end(a_trial())
    tracking.on_end(make_result((a_trial(),), (), folder=None, ended="trials", interrupted=False))
    tracking.close()
    assert problems == ["logging to json has stopped, because it failed: no space left"]
    assert tracker.calls[-1][0] == failing


def test_a_tracker_ends_once_and_only_if_it_was_started(tmp_path):
    tracker, tracking, _ = tracked(tmp_path)
    tracking.close()
    assert tracker.calls == []
    tracker, tracking, _ = tracked(tmp_path)
    tracking.on_start(PLAN)
    tracking.close()
    tracking.close()
    assert tracker.calls == [("start", "m"), ("end", "failed")]


def test_the_best_so_far_of_a_resumed_run_begins_with_its_earlier_trials(tmp_path):
    tracker, tracking, _ = tracked(tmp_path)
    measured = Measurement(status=Status.OK, throughput=9.0)
    tracking.on_start(replace(PLAN, earlier=(replace(a_trial(), measurement=measured),)))
    tracking.on_trial_end(a_trial())
    assert tracker.calls[1] == ("trial", 0, {"micro_batch": 1}, "ok")
    assert tracker.calls[2][2]["trial/throughput"] == 2.0 and tracker.calls[2][2]["best_so_far"] == 9.0


def test_bad_input_is_named(tmp_path):
    with pytest.raises(UsageError, match="unknown tracker 'wandbb'; did you mean 'wandb'"):
        rl.tune(train, space(), trials=1, out=tmp_path / "a", log_to="wandbb")
    with pytest.raises(UsageError, match="logging to mlflow needs a folder"):
        rl.tune(train, space(), trials=1, log_to=["mlflow"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_before_anything_starts(name, monkeypatch, tmp_path):
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=f"`log_to` {name} needs .*: pip install {name}"):
        with logging_to(name, tmp_path, SearchListener()):
            raise AssertionError("unreachable")
