"""Programs of one job share memory and take turns; one that fails does not affect the others."""

import itertools
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import psutil
import pytest
import redline
from redline.base.device import Device, detect
from redline.results import Measurement, Status
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.trial.job import Job, Rendezvous
from redline.space import Config


@dataclass(frozen=True)
class Program:
    """Records when each of its turns starts and ends. Ends itself in one of them if `fails` is set."""

    name: str
    notes: str
    fails: str = ""

    def __call__(self, context):
        turns, ready = 0, time.monotonic()
        context.turn.done()
        if context.world_size > 1:
            import torch.distributed as dist
            from redline.runners.trial.dry_run import join

            join(context)
        while True:
            go = context.turn.wait()
            if context.world_size > 1:
                import torch

                over = torch.tensor([0.0 if go else 1.0])
                dist.all_reduce(over, op=dist.ReduceOp.MAX)
                go = not over.item()
            if not go:
                return turns, os.getpid(), ready
            begin = time.monotonic()
            if turns == 1 and self.fails == "raises":
                raise ValueError("lost its nerve")
            if turns == 1 and self.fails == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if turns == 1 and self.fails == "hangs":
                time.sleep(600)
            if turns == 1 and self.fails == "memory":
                bytearray(400 * 2**20)
            time.sleep(context.turn.seconds)
            if context.rank == 0:
                with open(self.notes, "a") as file:
                    file.write(f"{self.name} {begin} {time.monotonic()}\n")
            turns += 1
            context.turn.done()


def take_turns(bench, programs, *, ranks=1, **job):
    job = {"timeout_s": 120, "turn_s": 0.02, "turns_s": 0.5, **job}
    first, *beside = (cloudpickle.dumps(each) for each in programs)
    made = Job(
        program=first, beside=tuple(beside), ranks=ranks, rendezvous=Rendezvous(world_size=ranks), threads=1, **job
    )
    outcome = bench.agent.run(made)
    assert outcome.status is Status.OK, outcome.reason
    assert bench.left_behind() == []
    return [each.report for each in outcome.ranks]


def noted(path):
    """Turns in their order: name, start, end."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return [(name, float(begin), float(end)) for name, begin, end in lines]


@pytest.mark.parametrize("ranks", [1, 2])
def test_turns_alternate_and_never_overlap_and_another_begins_each_time(bench, tmp_path, ranks):
    notes = str(tmp_path / "notes")
    results = take_turns(bench, [Program(name, notes) for name in "abc"], ranks=ranks)
    turns = noted(notes)
    assert 6 <= len(turns) <= 3 * 12 and len(turns) % 3 == 0
    for (_, _, end), (_, begin, _) in itertools.pairwise(turns):
        assert begin >= end
    for at in range(0, len(turns), 3):
        expected = ["abc", "bca", "cab"][at // 3 % 3]
        assert "".join(name for name, _, _ in turns[at : at + 3]) == expected
    for reports in results:
        assert [each.status for each in reports] == [Status.OK] * 3
        assert [each.report[0] for each in reports] == [len(turns) // 3] * 3
    # Each program has a process of its own, and they are built one at a time.
    assert len({each.report[1] for reports in results for each in reports}) == 3 * ranks
    ready = [each.report[2] for each in results[0]]
    assert ready == sorted(ready) and ready[-1] <= turns[0][1]


@pytest.mark.parametrize(
    ("fails", "status", "reason"),
    [
        ("raises", Status.CRASH, "ValueError: lost its nerve"),
        ("killed", Status.CRASH, "killed by signal 9 (SIGKILL)"),
        ("memory", Status.OOM, ""),
    ],
)
def test_a_failed_program_leaves_the_others_their_turns(bench, tmp_path, fails, status, reason):
    notes = str(tmp_path / "notes")
    programs = [Program("a", notes), Program("b", notes, fails), Program("c", notes)]
    (found,) = take_turns(bench, programs, memory_limit_mib=300)
    assert [each.status for each in found] == [Status.OK, status, Status.OK]
    assert reason in found[1].reason
    names = [name for name, _, _ in noted(notes)]
    assert names.count("b") == 1 and names.count("a") == names.count("c") == found[0].report[0] > 2


CONFIG = Config(
    tp=1, pp=1, dp=1, zero=0, micro_batch=2, grad_accum=2, checkpoint_ratio=0.0, precision="fp32", attention="sdpa",
    fusion=False, fused_optimizer=True,
)  # fmt: skip


def local(devices=1, **terms):
    plan = TimingPlan(seconds=0.5)
    workload = redline.workload("gpt2-tiny", seq_len=16, global_batch=4)
    return LocalRunner(workload, TrialTerms(device=detect(), devices=devices, threads=1, plan=plan, **terms))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_candidates_that_take_turns_are_measured_as_they_are_alone(devices):
    small = Config({**CONFIG, "dp": devices, "micro_batch": 1, "grad_accum": 4 // devices})
    large = Config({**small, "micro_batch": 2, "grad_accum": 2 // devices})
    unbuilt = Config({**small, "attention": "nonsense"})
    configs = [small, unbuilt, large]
    with local(devices) as runner:
        assert runner.takes_turns
        alone = runner.run(TrialRequest(config=small, number=0))
        requests = [TrialRequest(config=each, number=number) for number, each in enumerate(configs)]
        found = runner.take_turns(requests, [alone] * 3)
    assert len(found[0]) == len(found[2]) >= 2
    for turns in (found[0], found[2]):
        assert {each.status for each in turns} == {Status.OK}
        assert all(each.throughput == pytest.approx(4 * 16 / each.step_ms * 1e3) for each in turns)
        assert all(each.foreign_cores is not None for each in turns)
    assert len({each.throughput for each in found[0]}) > 1
    assert (found[0][0].loss, found[0][0].probe) == (alone.loss, alone.probe)
    (failed,) = found[1]
    assert failed.status is Status.CRASH and "nonsense" in failed.reason


def test_programs_that_do_not_fit_together_take_no_turns():
    room = min(detect().memory_mib, psutil.virtual_memory().available / 2**20)
    with local() as runner:
        requests = [TrialRequest(config=CONFIG, number=number) for number in range(2)]
        for peaks in ([0.4 * room, 0.4 * room], [1.0, None]):
            alone = [Measurement(status=Status.OK, peak_memory_mib=each) for each in peaks]
            assert runner.take_turns(requests, alone) is None


def test_candidates_on_gpus_are_measured_one_after_the_other():
    device = Device(type="cuda", name="a GPU", count=1, memory_mib=81_079)
    runner = LocalRunner.__new__(LocalRunner)
    runner.terms, runner.confirms = TrialTerms(device=device), True
    assert not runner.takes_turns


@contextmanager
def beside(notes, seconds):
    """Runs another process that computes for so many seconds from the first turn on."""

    def compute():
        while not notes.exists():
            time.sleep(0.01)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))

    other = multiprocessing.get_context("fork").Process(target=compute, daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()
