"""Compilation on any rank counts neither towards a trial's time nor its warm-up; one that hangs is killed."""

import sys
import time

import cloudpickle
import pytest
from probes import part
from redline.base.device import Device
from redline.models import Workload
from redline.results import Status
from redline.runners import TrialRequest, TrialTerms
from redline.runners.dispatch import DryRunner
from redline.runners.trial.compiling import Compilation
from redline.runners.trial.dry_run import DryRun, DryRunReport
from redline.runners.trial.job import Outcome, RankOutcome
from redline.runners.trial.timing import TimingPlan
from redline.space import Config

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_S = 5.0


def slow_compiler(until):
    """A compiler that finishes at this moment of the machine's clock."""

    def compiler(graph, inputs):
        time.sleep(max(0.0, until - time.monotonic()))
        return graph.forward

    return compiler


def compiled_sum(until):
    import torch

    return torch.compile(lambda x: (x * 2).sum(), backend=slow_compiler(until))


def watched(context):
    return Compilation(context.compiling)


@pytest.mark.slow
def test_a_compilation_longer_than_the_deadline_is_no_timeout(bench):
    def program(context):
        import torch

        compilation = watched(context)
        value = compiled_sum(time.monotonic() + TIMEOUT_S + 1)(torch.ones(3))
        return float(value), compilation.seconds

    outcome = bench.run(program, timeout_s=TIMEOUT_S, compile_timeout_s=100)
    assert outcome.status is Status.OK, outcome.reason
    value, seconds = outcome.ranks[0].report
    assert value == 6.0
    assert seconds > TIMEOUT_S


@pytest.mark.parametrize(("elsewhere", "reports"), [(True, [True, False]), (False, [])])
def test_a_rank_counts_as_waiting_for_compilations_on_other_hosts_until_all_have_settled(elsewhere, reports):
    heard = []
    compilation = Compilation(heard.append, elsewhere=elsewhere)
    compilation.expected()
    compilation.settled()
    assert heard == reports


def test_a_hanging_compilation_is_killed_and_reported_as_such(bench, tmp_path):
    def program(context):
        import torch

        watched(context)
        context.phase("first steps")
        compiled_sum(time.monotonic() + 600)(torch.ones(3))

    log = tmp_path / "0.log"
    outcome = bench.run(program, timeout_s=60, compile_timeout_s=1, log=str(log))
    assert outcome.status is Status.TIMEOUT
    assert outcome.reason == "compilation took more than 1 s (during first steps)"
    assert "compiler" in log.read_text()


def batch(size, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def loss(output, batch):
    return ((output - batch[1]) ** 2).mean()


def test_a_dry_run_tells_compilation_from_building_warm_up_and_measuring(bench):

    def schedule(sch, config):
        sch["0"].compile(backend=lambda graph, inputs: time.sleep(1.0) or graph.forward)

    def model():
        from torch import nn

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return self.linear(x).relu()

        return nn.Sequential(Block(), nn.Linear(4, 1))

    workload = Workload(name="tiny", model=model, batch=batch, loss=loss, schedule=schedule, global_batch=8)
    program = DryRun(workload=workload, config=Config(micro_batch=8), plan=TimingPlan(seconds=0.1))
    outcome = bench.run(program, timeout_s=60, compile_timeout_s=60)
    assert outcome.status is Status.OK, outcome.reason
    report = outcome.ranks[0].report
    assert report.seconds_compile >= 1.0
    assert report.step_ms < 1000


@pytest.mark.parametrize(("asked", "compile_s"), [(20.0, 300.0), (None, 600.0), (3600.0, 3600.0)])
def test_compilation_has_as_long_again_as_the_trial_and_five_minutes_at_least(asked, compile_s):
    jobs = []

    class Takes(DryRunner):
        def dispatch(self, job):
            jobs.append(job)
            report = DryRunReport(
                step_ms=10.0, spread_ms=1.0, steps=5, samples_per_step=8, tokens_per_step=None, flops_per_step=None,
                loss=1.0, last_loss=1.0, probe=part(), first=None, seconds_build=2.0, seconds_compile=30.0,
                seconds_warmup=1.0, seconds_measure=3.0, peak_memory_mib=1.0, peak_allocated_mib=None,
                allocation_retries=0,
            )  # fmt: skip
            return Outcome(status=Status.OK, ranks=(RankOutcome(rank=0, status=Status.OK, report=report),))

    workload = Workload(model=lambda: None, batch=batch, loss=loss)
    terms = TrialTerms(device=Device(type="cpu", name="a CPU", count=1, memory_mib=1000), timeout_s=600.0)
    done = Takes(workload, terms).run(TrialRequest(config=Config(), number=0, timeout_s=asked))
    assert (jobs[0].timeout_s, jobs[0].compile_timeout_s) == (asked or 600.0, compile_s)
    assert (done.seconds_build, done.seconds_compile) == (32.0, 30.0)
    assert (done.seconds_warmup, done.seconds_measure) == (1.0, 3.0)
