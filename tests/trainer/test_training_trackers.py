"""`redline train --log-to`: each tracker's records of a training, also of a resumed one."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redline.results.names import LOG
from redline.space import Config
from redline.trainer.listener import RUNS, TrainingStart, TrainingStrategy, TrainListener, TrainTracking
from redline.tuner.trackers import Tracker, logging_to
from tiers import tiered


def training_start(folder, step=0, zero=0):
    return TrainingStart(
        name="gpt2-tiny", folder=folder, strategy=TrainingStrategy(config=Config({"zero": zero}), devices=2, why="the winner"),
        where="2 x CPU", data={}, steps=100, step=step, unit="tokens/s", hyperparameters={"lr": 1e-3, "ema": None},
    )  # fmt: skip


def step_line(step, loss):
    return {"kind": "step", "step": step, "loss": loss, "lr": 0.1, "grad_norm": None, "mfu": float("nan")}


def session(folder, name, lines, step=0, zero=0):
    """Runs one session of a training that logs these lines to its file and the tracker. Returns the messages to the user."""
    messages_to = TrainListener()
    problems = []
    messages_to.on_message = problems.append
    with logging_to(name, folder, messages_to, TrainTracking) as listener:
        listener.on_start(training_start(folder, step, zero))
        for line in lines:
            with (folder / LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")
            listener.on_line(line)
    return problems


FIRST = [
    step_line(10, 5.0),
    step_line(20, 4.0),
    {"kind": "evaluation", "step": 20, "loss": 4.5},
    {"kind": "checkpoint", "step": 20, "seconds": 2.0, "stalled": 0.5, "failure": ""},
    step_line(30, 3.0),
    {"kind": "checkpoint", "step": 30, "seconds": 2.0, "stalled": 0.5, "failure": "No space left on device"},
    {"kind": "evaluation", "step": 35, "loss": 3.5},
]  # the session is killed here
SECOND = [
    {"kind": "resumed", "step": 20, "checkpoint": "step-20"},
    step_line(30, 3.0),
    {"kind": "evaluation", "step": 35, "loss": 3.5},
    step_line(40, 2.0),
    {"kind": "end", "step": 40, "stopped": False, "failure": ""},
]


def twice(folder, name):
    folder.mkdir(exist_ok=True)
    problems = session(folder, name, FIRST)
    if name == "tensorboard":
        time.sleep(
            1.1
        )  # it reads files in the order of the seconds in their names; two trainings never start in the same second
    problems += session(folder, name, SECOND, step=20, zero=3)
    assert problems == []


LOSSES = {10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0}
HELD_OUT = {20: 4.5, 35: 3.5}


def test_tensorboard_continues_in_its_folder_without_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == list(LOSSES.items())
    assert [(each.step, each.value) for each in events.Scalars("held_out/loss")] == list(HELD_OUT.items())
    assert events.Scalars("checkpoint/seconds")[0].step == 20
    assert "train/grad_norm" not in events.Tags()["scalars"] and "train/mfu" not in events.Tags()["scalars"]
    texts = {}
    for event in events.Tensors("events/text_summary"):
        texts.setdefault(event.step, event.tensor_proto.string_val[0].decode())
    assert texts[0] == "2 devices: zero=0 (the winner)" and texts[20] == "2 devices: zero=3 (the winner)"


@pytest.mark.parametrize("lost", tiered([True], [False]))
@pytest.mark.slow
def test_mlflow_continues_in_its_run_without_repeated_steps(tmp_path, monkeypatch, lost):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    session(tmp_path, "mlflow", FIRST + SECOND) if lost else twice(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("redline gpt2-tiny").experiment_id])
    assert json.loads((tmp_path / RUNS).read_text()) == {"mlflow": run.info.run_id}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in history) == list(LOSSES.items())
    history = client.get_metric_history(run.info.run_id, "held_out/loss")
    assert sorted((each.step, each.value) for each in history) == list(HELD_OUT.items())
    assert run.data.params == {"lr": "0.001", "where": "2 x CPU", "knob.zero": "0"}
    assert run.info.status == "FINISHED"
    assert run.data.tags["redline.event.30.2"] == "the checkpoint of step 30 was not saved: No space left on device"
    assert "zero=0" in run.data.tags["redline.event.0.1"]
    assert lost or "zero=3" in run.data.tags["redline.event.20.1"]


@pytest.mark.slow
def test_wandb_continues_in_its_run_without_repeated_steps(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    # A separate process: wandb starts a service that would outlive this test.
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import importlib.util as u\n"
        "s = u.spec_from_file_location('t', sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "from pathlib import Path\n"
        "m.twice(Path('train'), 'wandb')\n"
    )
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", code, __file__, support], cwd=tmp_path, capture_output=True, text=True, timeout=570, check=False,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "train" / RUNS).read_text())["wandb"]
    first, second = sorted((tmp_path / "train" / "wandb").glob(f"offline-run-*/run-{run}.wandb"))
    rows = [rows_of(first), rows_of(second)]
    assert [(row["step"], row["train/loss"]) for row in rows[0] if "train/loss" in row] == [(10, 5), (20, 4), (30, 3)]
    assert [(row["step"], row["train/loss"]) for row in rows[1] if "train/loss" in row] == [(40, 2)]
    assert [row["held_out/loss"] for each in rows for row in each if "held_out/loss" in row] == [4.5, 3.5]
    assert [row["event"].split()[2] for each in rows for row in each if "(the winner)" in row.get("event", "")] == [
        "zero=0", "zero=3",
    ]  # fmt: skip


def rows_of(path):
    """Rows logged to an offline wandb run: records in blocks of 32 KiB, as in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, out = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            part = b""
            if record.HasField("history"):
                items = record.history.item
                out.append({each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items})
    return out


class Recorder(Tracker):
    """A tracker that keeps its calls, one of which can be made to fail."""

    name = package = "json"  # a module that is there

    def __init__(self, folder, failing=""):
        super().__init__(folder)
        self.failing, self.calls = failing, []

    def _call(self, *call):
        self.calls.append(call)
        if call[0] == self.failing:
            raise OSError("no space left")

    def start(self, title, settings, runs):
        self._call("start", runs)
        return "a run"

    def log(self, step, metrics):
        self._call("log", step)

    def event(self, step, text):
        self._call("event", step, text)

    def end(self, ended, results):
        self._call("end", ended)


def tracked(tmp_path, failing=""):
    """A recorder, its listener, and the messages to the user."""
    problems = []
    user = TrainListener()
    user.on_message = problems.append
    tracker = Recorder(tmp_path, failing)
    return tracker, TrainTracking([tracker], user), problems


def test_ranks_that_begin_again_repeat_nothing(tmp_path):
    tracker, tracking, _ = tracked(tmp_path)
    tracking.on_start(training_start(tmp_path))
    saved = {"kind": "checkpoint", "step": 10, "seconds": 1.0, "stalled": 0.0, "failure": ""}
    lines = [step_line(10, 5.0), step_line(20, 4.0), saved, step_line(10, 5.0), step_line(20, 4.0), step_line(30, 3.0)]
    for line in lines:
        tracking.on_line(line)
    # A checkpoint may end after later steps.
    assert tracker.calls[2:] == [("log", 10), ("log", 20), ("log", 10), ("log", 30)]


def test_a_change_of_configuration_is_logged_in_the_same_run(tmp_path):
    tracker, tracking, problems = tracked(tmp_path)
    tracking.on_message("before it starts")
    tracking.on_start(training_start(tmp_path))
    tracking.on_message("out of memory")
    tracking.on_start(training_start(tmp_path, step=0, zero=3))
    configurations = [f"2 devices: zero={zero} (the winner)" for zero in (0, 3)]
    events = [("event", 0, text) for text in (configurations[0], "out of memory", configurations[1])]
    assert tracker.calls == [("start", {}), *events]
    assert problems == ["before it starts", "out of memory"]
