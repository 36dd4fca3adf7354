"""A winner that fails on batches of varied lengths is found before it is reported; the next one that passes is reported."""

import csv
from types import SimpleNamespace

import pytest
import redline as rl
import yaml
from memory_folder import MemoryFolder
from redline.base.errors import UsageError
from redline.results import Measurement, Status, Trial
from redline.runners import Runner
from redline.runners.trial.soak import SLACK, SoakPlan
from redline.space import Config
from redline.tuner.budget import Budget, Stopwatch
from redline.tuner.search import Search

WORKLOAD = '''
import os
import time

import torch
from torch import nn

import redline as rl
from redline.models.data import TokenBatches

torch.set_num_threads(1)
LENGTH = 64


def make_space():
    space = rl.Space()
    micro = space.choice("micro_batch", [2, 16], default=16)
    space.derive("grad_accum", 16 // micro)
    return space


class Net(nn.Module):
    """The larger its micro-batch, the faster."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))

    def forward(self, input_ids):
        time.sleep(0.002)
        return self.net(input_ids)


class Hoarder(Net):
    """Keeps a quarter of a MiB for each sample of each length that it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def forward(self, input_ids):
        self.seen.setdefault(input_ids.shape, torch.ones(input_ids.shape[0], 2**16))
        return super().forward(input_ids)


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def large_and_short(batch):
    return len(batch["labels"]) == 16 and batch["labels"].shape[1] < LENGTH


def no_number(output, batch):
    return loss(output, batch) * (float("nan") if large_and_short(batch) else 1.0)


def dying(output, batch):
    if large_and_short(batch):
        os._exit(7)
    return loss(output, batch)


def slow(output, batch):
    if large_and_short(batch):
        time.sleep(60)
    return loss(output, batch)


def workload(name, model=Net, loss=loss):
    batch = TokenBatches(task="causal", seq_len=LENGTH, vocab_size=100)
    return rl.Workload(
        name=name, model=model, batch=batch, loss=loss, space=make_space(), seq_len=LENGTH, global_batch=16
    )


hoarder, nan = workload("hoarder", Hoarder), workload("nan", loss=no_number)
dead, late = workload("dead", loss=dying), workload("late", loss=slow)
'''


@pytest.fixture
def tuned(tmp_path):
    """Tunes one of these workloads in real processes. Returns the result, and the rows of trials.csv by micro-batch."""
    (tmp_path / "work.py").write_text(WORKLOAD)

    def tune(name, **asked):
        out = tmp_path / ("soaked" if asked.get("soak") else "not")
        found = rl.tune(
            f"{tmp_path}/work.py:{name}", runner="local", sampler="grid", measure_time=0.1, out=out, **asked
        )
        with open(out / "trials.csv", newline="") as file:
            rows = {int(row["knob.micro_batch"]): row for row in csv.DictReader(file)}
        return found, rows, out

    return tune


def test_memory_that_runs_out_on_varied_lengths_is_found_by_a_soak(tuned):
    found, rows, out = tuned("hoarder", memory_limit="120MiB", soak=True)
    assert found.winner.config["micro_batch"] == 2
    assert (rows[16]["status"], rows[2]["status"]) == ("oom", "ok")
    reason = rows[16]["reason"]  # which allocation fails is random
    assert reason.startswith("when measured again: in its soak: ") and "(during soak); the first time" in reason
    assert rows[16]["log"].endswith(".soak.log") and (out / rows[16]["log"]).stat().st_size > 0
    fallen, held = found.notes[-2:]
    assert fallen.startswith("trial 0 led, but failed: oom in its soak: ")
    assert held.startswith("trial 1 succeeded: soaked for 202 steps of 8 to 64 tokens; ")
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["best"]["configuration"]["micro_batch"] == 2
    assert "--fix micro_batch=2 --trials 1 --soak" in best["reproduce"]
    assert yaml.safe_load((out / "run.yaml").read_text())["asked"]["soak"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("nan", "wrong", "in its soak: loss is nan"),
        ("dead", "crash", "in its soak: the process exited with code 7 before it reported (during soak)"),
        ("late", "timeout", "(during soak"),
    ],
)
def test_the_outcome_of_a_soak_is_the_trial_s(tuned, name, status, reason):
    found, rows, _ = tuned(name, soak=True, trial_timeout="15s")
    assert found.winner.config["micro_batch"] == 2
    assert rows[16]["status"] == status and reason in rows[16]["reason"], rows[16]["reason"]


def test_a_soak_has_no_part_in_what_trains_by_itself():
    space = rl.Space()
    space.choice("micro_batch", [1, 2])
    with pytest.raises(
        UsageError, match="soak=True trains a workload's winner .* cannot be used with a command or a callable"
    ):
        rl.tune(lambda config: 1.0, space, soak=True)


def folder_of(throughputs, step_ms=10.0):
    return MemoryFolder(
        Trial(
            number=number,
            config=Config(micro_batch=number),
            measurement=Measurement(status=Status.OK, throughput=throughput, step_ms=step_ms, seconds_total=1.0),
        )
        for number, throughput in enumerate(throughputs)
    )


class Soaks(Runner):
    """A runner in which only the trials in `holding` pass the soak."""

    name = "soaks"

    def __init__(self, holding):
        self.holding, self.requests = holding, []

    def run(self, request):
        self.requests.append(request)
        if request.number in self.holding:
            return Measurement(status=Status.OK, throughput=1.0, reason="soaked")
        return Measurement(status=Status.OOM, reason="full")


def soaked(throughputs, holding, seconds=None, **given):
    """Runs a search with a soak. Returns its folder, its runner and its messages."""
    folder, runner, messages = folder_of(throughputs), Soaks(holding), []
    search = Search(
        run_folder=folder,
        sampler=SimpleNamespace(name="none", space=None),
        runner=runner,
        budget=Budget(seconds=seconds),
        soak_plan=SoakPlan(),
        **given,
    )
    search.soak(messages.append)
    return folder, runner, messages


def test_leaders_are_soaked_from_the_first_on_until_one_holds_up():
    folder, runner, messages = soaked([3.0, 5.0, 4.0, 1.0], holding={0, 3})
    assert [each.number for each in runner.requests] == [1, 2, 0]
    assert [trial.measured.status for trial in folder.trials()] == ["ok", "oom", "oom", "ok"]
    assert folder.trials()[1].measured.reason == "when measured again: in its soak: full; the first time 5"
    assert len(messages) == 3 and messages[-1] == "trial 0 succeeded: soaked"


def test_without_a_soaked_success_there_is_no_winner():
    folder, runner, _ = soaked([3.0, 5.0], holding=())
    assert [each.number for each in runner.requests] == [1, 0]
    assert not any(trial.ok for trial in folder.trials())


def test_a_soak_is_given_the_time_its_steps_may_take():
    _, runner, _ = soaked([5.0], holding={0}, trial_timeout_s=60.0)
    (request,) = runner.requests
    assert request.soak == SoakPlan()
    assert request.timeout_s == pytest.approx(60.0 + SLACK * 202 * 0.010)
    assert request.soak.compile_timeout_s == 0.0
    _, runner, _ = soaked([5.0], holding={0}, trial_timeout_s=None)
    assert runner.requests[0].timeout_s is None


def test_trials_end_in_time_for_the_soak():
    slow = folder_of([5.0], step_ms=1000.0)

    def ended(plan):
        search = Search(
            run_folder=slow,
            sampler=SimpleNamespace(name="none", space=None, propose=lambda trials, count: []),
            runner=Soaks(()),
            budget=Budget(seconds=300.0),
            soak_plan=plan,
            watch=Stopwatch(90.0),
        )
        search.run()
        return search.ended

    assert ended(None) == "every valid configuration was tried"
    assert ended(SoakPlan()) == "the rest of the 300 s is not enough for another trial"


def test_without_time_the_soak_is_skipped_with_a_note():
    watch = Stopwatch(1e-9)
    folder, runner, messages = soaked([5.0], holding=(), seconds=1.0, watch=watch)
    assert runner.requests == [] and folder.trials()[0].ok
    assert messages == ["the time was up before the leader, trial 0, was soaked"]
