"""TensorBoard's event files are read while a real writer in a separate process writes them."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from redline.base.device import detect
from redline.base.errors import MissingDependency, UsageError
from redline.results import Status
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.command.command import Command
from redline.runners.command.reading import Events
from redline.runners.command.work import Commands

pytest.importorskip("tensorboard")
TORCH = """
import sys, time
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
"""
WRITER = """
import sys, time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

class SummaryWriter(EventFileWriter):
    def add_scalar(self, tag, value, step):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self.add_event(Event(wall_time=time.time(), step=step, summary=summary))

writer = SummaryWriter(sys.argv[1])
"""
"""The parts of torch's SummaryWriter; it starts in a fifth of the time."""


@pytest.fixture
def writer(tmp_path):
    """Starts a script that has a `writer` and waits for a line of input before each further part."""
    started = []

    def begin(text, folder=tmp_path / "runs", by=WRITER):
        script = tmp_path / f"{len(started)}.py"
        script.write_text(by + textwrap.dedent(text))
        command = [sys.executable, str(script), str(folder)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate()


def until_it_says(process, word):
    assert process.stdout.readline().strip() == word


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_scalars_are_read_by_tag_with_their_own_times_while_they_are_written(tmp_path, writer):
    events = Events(tmp_path / "runs", {"train/steps_per_second": "steps_per_second"})
    assert events.read(time.monotonic()) == []
    begin = time.monotonic()
    process = writer(
        """
        writer.add_scalar("train/steps_per_second", 2.5, 10)
        writer.add_scalar("loss", 7.0, 10, new_style=True)
        writer.add_text("notes", "many words", 10)
        writer.flush()
        print("first", flush=True)
        input()
        time.sleep(0.3)
        writer.add_scalar("train/steps_per_second", 3.5, 20)
        writer.add_histogram("weights", __import__("torch").arange(10.0), 20)
        writer.flush()
        print("second", flush=True)
        input()
        """,
        by=TORCH,
    )
    until_it_says(process, "first")
    first = events.read(time.monotonic())
    assert [each.values for each in first] == [{"step": 10.0, "steps_per_second": 2.5}, {"step": 10.0, "loss": 7.0}]
    assert begin < first[0].at <= first[1].at < time.monotonic() and events.read(time.monotonic()) == []
    go_on(process)
    until_it_says(process, "second")
    time.sleep(0.2)  # the time of reading differs from the time of writing
    read_at = time.monotonic()
    (second,) = events.read(read_at)
    assert second.values == {"step": 20.0, "steps_per_second": 3.5}
    assert second.at - first[0].at >= 0.3 and read_at - second.at >= 0.15


def test_an_event_that_is_written_in_two_pieces_is_read_when_it_is_whole(tmp_path, writer):
    process = writer(
        'writer.add_scalar("speed", 2.5, 1); writer.close(); print("done", flush=True)', tmp_path / "there"
    )
    events = Events(tmp_path / "runs")
    until_it_says(process, "done")
    (path,) = (tmp_path / "there").iterdir()
    whole = path.read_bytes()
    (tmp_path / "runs" / "deeper").mkdir(parents=True)
    copy = tmp_path / "runs" / "deeper" / path.name
    copy.write_bytes(whole[:-5])
    assert events.read(time.monotonic()) == []
    with copy.open("ab") as file:
        file.write(whole[-5:])
    assert [each.values for each in events.read(time.monotonic())] == [{"step": 1.0, "speed": 2.5}]


def test_events_of_several_files_are_ordered_by_time_without_earlier_runs(tmp_path, writer):
    process = writer('writer.add_scalar("a", 1.0, 5); writer.close(); print("done", flush=True)')
    until_it_says(process, "done")
    events = Events(tmp_path / "runs")
    process = writer(
        """
        other = SummaryWriter(sys.argv[1] + "/eval")
        for step in range(3):
            writer.add_scalar("a", step, step)
            other.add_scalar("b", step, step)
        writer.close()
        other.close()
        print("done", flush=True)
        """
    )
    until_it_says(process, "done")
    values = [each.values for each in events.read(time.monotonic())]
    assert values == [{"step": float(step), name: float(step)} for step in range(3) for name in ("a", "b")]


@pytest.fixture
def run(space, tmp_path, monkeypatch):
    """Runs a trial of a script that writes events to the given folder."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(checkout)

    def run(text, *, plan=1.0, **more):
        Path("train.py").write_text(WRITER + textwrap.dedent(text))
        command = f"{sys.executable} train.py {{trial_dir}}/runs {{micro_batch}}"
        work = Commands(Command(command=command, metric_file="{trial_dir}/runs", **more), space, devices=1)
        terms = TrialTerms(device=detect(), timeout_s=120, plan=TimingPlan(seconds=plan))
        with LocalRunner(work, terms) as runner:
            log = tmp_path / "run" / "logs" / "0.log"
            return runner.run(TrialRequest(config=space.config(micro_batch=2), number=0, log=log))

    return run


def test_a_trial_is_timed_by_the_steps_of_its_events_and_ended_once_they_are_steady(run):
    begin = time.monotonic()
    measured = run(
        """
        for step in range(6000):
            time.sleep(0.02)
            writer.add_scalar("train/grad_norm", 1.0, step)
            writer.add_scalar("train/loss", 3.0, step)
            if step % 10 == 9:
                writer.flush()
        """,
        metric=["step", "train/loss"],
    )
    assert measured.status is Status.OK, measured.reason
    # Steps of 20 ms and of two samples, although ten of them arrive at once.
    assert measured.unit == "samples/s" and 20 <= measured.step_ms < 40 and 50 < measured.throughput <= 100
    assert measured.loss == 3.0 and time.monotonic() - begin < 60


def test_an_unknown_tag_counts_with_its_last_value(run):
    measured = run(
        """
        for step in range(5):
            writer.add_scalar("perf/throughput(tok/s)", 100.0 + step, step)
        writer.close()
        """,
        metric=["perf/throughput(tok/s)", "train/loss"],
    )
    assert (measured.status, measured.throughput, measured.unit) == (Status.OK, 104.0, "perf/throughput(tok/s)")


def test_a_missing_tag_is_reported_with_the_existing_ones(run):
    measured = run('writer.add_scalar("perf/tps", 1.0, 1); writer.close()', metric=["perf/tqs"])
    assert measured.status is Status.CRASH
    assert measured.reason == "the command ended without reporting 'perf/tqs'; it reported step, perf/tps"


def test_a_file_that_is_no_event_file_says_so(run):
    measured = run(
        """
        import os, shutil
        writer.close()
        shutil.rmtree(sys.argv[1])
        open(sys.argv[1], "w").write('{"a": 1}')
        time.sleep(60)
        """,
        metric=["a"],
    )
    assert measured.status is Status.CRASH
    assert "is a file, not a folder of TensorBoard events; add an ending" in measured.reason


def command(file, **more):
    return Command(command="true {micro_batch} {trial_dir}", metric_file=file, **more)


@pytest.mark.parametrize("file", ["{trial_dir}/runs", "events.out.tfevents.1.host.2.0", "logs", "logs.d"])
def test_without_tensorboard_its_files_are_refused_before_the_first_trial(space, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs.d").mkdir()
    Commands(command(file, metric=["a"]), space, devices=1)
    for module in [each for each in sys.modules if each.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingDependency, match="which TensorBoard reads: pip install tensorboard"):
        Commands(command(file, metric=["a"]), space, devices=1)
    Commands(command("{trial_dir}/log.jsonl"), space, devices=1)


def test_event_files_without_a_metric_are_refused(space):
    with pytest.raises(UsageError, match="choose a tag with --metric"):
        Commands(command("{trial_dir}/runs"), space, devices=1)
