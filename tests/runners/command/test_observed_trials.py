"""Trials of commands that train with PyTorch: measured from inside, whatever they print."""

import sys
import textwrap
from pathlib import Path

import pytest
from redline.base.device import detect
from redline.results import Status
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.command.command import Command
from redline.runners.command.work import Commands

TRAINING = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

def train(batch, steps=400, cost=0.02, accumulate=1, largest=64):
    data = TensorDataset(torch.randn(batch * accumulate * steps, 8))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, (rows,) in enumerate(DataLoader(data, batch_size=min(batch, largest)), start=1):
        time.sleep(cost)
        yield number
        (model(rows).square().mean() / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def run(space, tmp_path, monkeypatch):
    """Runs trials of a script, which begins with `TRAINING`, on one runner."""
    monkeypatch.chdir(tmp_path)
    runners = []

    def run(text, micro_batches=(2,), timeout_s=100, **more):
        Path("train.py").write_text(TRAINING + textwrap.dedent(text))
        asked = {"global_batch": more.pop("global_batch", None), "ranks": more.pop("ranks", None)}
        work = Commands(
            Command(command=f"{sys.executable} train.py {{micro_batch}}", **more), space, devices=1, **asked
        )
        terms = TrialTerms(device=detect(), timeout_s=timeout_s, plan=TimingPlan(seconds=1.0))
        runners.append(LocalRunner(work, terms))
        configs = [space.config(micro_batch=size) for size in micro_batches]
        return [
            runners[-1].run(TrialRequest(config=config, number=number, log=tmp_path / f"r/l/{number}.log"))
            for number, config in enumerate(configs)
        ]

    yield run
    for runner in runners:
        runner.close()


def test_a_training_that_prints_nothing_is_measured_and_ended(run):
    (measured,) = run("for step in train(int(sys.argv[1])): pass")
    assert measured.status is Status.OK, measured.reason
    assert measured.unit == "samples/s" and 60 < measured.throughput <= 101
    assert measured.step_ms == pytest.approx(2e3 / measured.throughput) and measured.step_ms_spread > 0
    assert measured.observed["samples_per_step"] == measured.samples_per_step == 2
    assert measured.observed["optimizers"] == ["SGD"] and measured.observed["trained"] == {"float32": 9}
    assert measured.peak_memory_mib > 50 and measured.seconds_measure >= 1


def test_the_last_batch_of_an_epoch_may_be_smaller(run):
    text = """
    batch = int(sys.argv[1])
    data = TensorDataset(torch.randn(6, 8))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(4000):
        for (rows,) in DataLoader(data, batch_size=batch):
            time.sleep(0.004 * len(rows))
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    for size, steps, measured in zip((2, 4), (3, 2), run(text, micro_batches=(2, 4)), strict=True):
        assert measured.status is Status.OK, measured.reason
        observed = measured.observed
        assert (observed["usual_batch"], observed["usual_step"]) == (size, size)
        assert observed["samples_per_step"] == pytest.approx(6 / steps, rel=0.05)


def test_what_is_printed_does_not_count_where_steps_are_observed(run):
    text = """
    from tqdm import tqdm
    for _ in tqdm(range(300), desc="Training"): time.sleep(0.01)
    for step in tqdm(train(int(sys.argv[1])), desc="Training", total=400):
        print('{"samples_per_second": 100000}', flush=True)
    """
    (measured,) = run(text)
    assert measured.status is Status.OK and 60 < measured.throughput <= 101, measured


def test_a_printed_speed_that_was_asked_for_must_be_the_observed_one(run):
    text = "for step in train(int(sys.argv[1]), cost=0.1): print('speed', {} * 2 / 0.1, flush=True)"
    metric = [r"speed (?P<samples_per_second>[\d.]+)"]
    (right,) = run(text.format(1), metric=metric)
    assert right.status is Status.OK and right.throughput == pytest.approx(20)
    (wrong,) = run(text.format(4), metric=metric)
    assert wrong.status is Status.WRONG and "it prints samples_per_second = 80" in wrong.reason


def test_a_batch_that_the_trainer_reduces_is_wrong_with_both_numbers(run):
    text = "for step in train(int(sys.argv[1]), largest=2): pass"
    fits, reduced = run(text, micro_batches=(2, 4))
    assert fits.status is Status.OK
    assert reduced.status is Status.WRONG
    assert reduced.reason == "it trains with 2 samples a pass, not 4: the trainer reduced its batch"


def test_another_accumulation_than_the_global_batch_asks_for_is_wrong(run, space):
    space.derive("grad_accum", 8 // space["micro_batch"])
    text = "for step in train(int(sys.argv[1]), accumulate={}): pass"
    (right,) = run(text.format("8 // int(sys.argv[1])"), global_batch=8, samples="8", micro_batches=(4,))
    assert right.status is Status.OK and right.samples_per_step == 8, right
    (wrong,) = run(text.format(1), global_batch=8, samples="8", micro_batches=(4,))
    assert wrong.reason == "it trains with 4 samples a step, not 8"


def test_stalls_count_and_are_named(run):
    (measured,) = run("for step in train(int(sys.argv[1]), cost=0.01): time.sleep(0.2 if step % 10 == 0 else 0)")
    # Ten steps take 0.3 s at least: 66 samples/s at most, where the median step has up to 200.
    assert measured.status is Status.OK and measured.throughput < 67
    median = 2e3 / measured.observed["median_step_ms"]
    assert median < 200 and 0.2 < measured.throughput / median < 0.5
    assert measured.reason.startswith("stalls take ") and "of the time: the median step takes 1" in measured.reason


def test_a_slow_candidate_is_ended_early(run, space, tmp_path):
    Path("train.py").write_text(TRAINING + "for step in train(int(sys.argv[1]), cost=0.1): pass")
    work = Commands(Command(command=f"{sys.executable} train.py {{micro_batch}}"), space, devices=1)
    with LocalRunner(work, TrialTerms(device=detect(), timeout_s=60, plan=TimingPlan(seconds=20.0))) as runner:
        config = space.config(micro_batch=2)
        measured = runner.run(TrialRequest(config=config, number=0, log=tmp_path / "r/l/0.log", best_throughput=100.0))
    assert measured.status is Status.OK and measured.reason.startswith("stopped early: "), measured
    assert measured.seconds_measure < 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "for step in train(2):\n    if step == 9: raise torch.OutOfMemoryError('no room')",
            "OutOfMemoryError: no room",
        ),
        (
            "sys.stderr = open(os.devnull, 'w')\nsys.excepthook = lambda *error: None\nfor step in train(2): raise MemoryError",
            "MemoryError",
        ),
    ],
)
def test_an_out_of_memory_is_known_by_its_type_whatever_is_printed(run, text, reason):
    (measured,) = run(textwrap.dedent(text))
    assert measured.status is Status.OOM and measured.reason.removeprefix("torch.") == reason


def test_an_exception_that_ends_the_training_is_the_reason(run):
    (measured,) = run("for step in train(2):\n    raise ValueError('expected 10 classes')")
    assert measured.status is Status.CRASH
    assert measured.reason == "the command exited with code 1: ValueError: expected 10 classes"


def test_a_loss_that_is_not_finite_is_wrong(run):
    text = """
    for step in train(2):
        torch.Tensor.square = lambda self: self * float("nan")
    """
    (measured,) = run(text)
    assert measured.status is Status.WRONG and measured.reason == "its loss is nan"


@pytest.mark.parametrize(("longest", "elements"), [("length", [4, 16]), ("length * (number + 1)", [None, None])])
def test_the_size_of_samples_is_noted_unless_it_varies(run, longest, elements):
    text = f"""
    length = 4 * int(sys.argv[1])
    model = torch.nn.Embedding(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    texts = [(number % 10, torch.ones({longest}, dtype=torch.int64)) for number in range(400)]
    for _, batch in DataLoader(texts, batch_size=1):
        time.sleep(0.02)
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    """
    measurements = run(text, (1, 4), samples="1")
    assert [measured.observed["elements_per_sample"] for measured in measurements] == elements


BATCHES_OF_ITS_OWN = """
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5))
if {compiled}:
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4000):
    time.sleep(0.001 * {size})
    optimizer.zero_grad()
    model(torch.randn({size}, 3, 8, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("size", "compiled", "reason"),
    [
        ("int(sys.argv[1])", False, None),
        ("int(sys.argv[1])", True, None),
        ("4", False, "its steps have 4 rows as in the first run, and not 4 samples instead of 1"),
    ],
)
def test_a_batch_that_no_loader_draws_is_seen_in_the_products(run, size, compiled, reason):
    first, second = run(BATCHES_OF_ITS_OWN.format(size=size, compiled=compiled), (1, 4))
    assert first.status is Status.OK and first.unit == "samples/s"
    assert first.observed["rows_per_step"] == (1 if reason is None else 4)
    if reason is None:
        assert second.status is Status.OK and second.observed["rows_per_step"] == 4
    else:
        assert second.status is Status.WRONG and second.reason.startswith(reason)


@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_nested_tensors_do_not_end_the_observation(run, layout):
    text = f"""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(4000):
        time.sleep(0.01)
        rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.{layout})
        optimizer.zero_grad()
        model(rows).to_padded_tensor(0.0).square().mean().backward()
        optimizer.step()
    """
    (measured,) = run(text, samples="2")
    assert measured.status is Status.OK and "observer failed" not in measured.reason
    assert measured.observed["rows_per_step"] is None and 100 < measured.throughput <= 201
