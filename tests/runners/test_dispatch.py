"""Reports of a trial's ranks become one measurement: the slowest rank's time, the fullest rank's memory, MFU."""

from dataclasses import replace

import pytest
from probes import part
from redline.base.device import Device
from redline.estimator.hardware import recognise
from redline.models import Workload
from redline.results import Status
from redline.runners import TrialRequest, TrialTerms
from redline.runners.dispatch import DryRunner
from redline.runners.trial.dry_run import DryRunReport
from redline.runners.trial.job import Outcome, RankOutcome
from redline.space import Config

MODEL = Workload(model=lambda: None, batch=lambda size, seed: (), loss=lambda output, batch: output, seq_len=1024)


class Answers(DryRunner):
    """A work whose ranks return the given reports."""

    def __init__(self, name, *reports, count=2, devices=2, slots=1):
        terms = TrialTerms(device=Device(type="cuda", name=name, count=count, memory_mib=81_079), devices=devices)
        super().__init__(MODEL, terms)
        self.reports, self.slots = reports, slots

    def dispatch(self, job):
        self.at_once = job.at_once
        ranks = [RankOutcome(rank=at, status=Status.OK, report=each) for at, each in enumerate(self.reports)]
        return Outcome(status=Status.OK, ranks=tuple(ranks))


def report(step_ms, memory):
    return DryRunReport(
        step_ms=step_ms, spread_ms=1.0, steps=5, samples_per_step=8, tokens_per_step=8192, flops_per_step=1e14,
        loss=10.0, last_loss=9.0, probe=part(), first=None, seconds_build=1.0, seconds_warmup=1.0, seconds_measure=1.0,
        peak_memory_mib=memory, peak_allocated_mib=memory, allocation_retries=0,
    )  # fmt: skip


def measured(name, precision):
    config = Config(precision=precision)
    return Answers(name, report(200.0, 5000.0), report(250.0, 3000.0)).run(TrialRequest(config=config, number=0))


@pytest.mark.parametrize(
    ("count", "devices", "slots", "expected"), [(8, 1, 8, 8), (8, 2, 3, 3), (8, 4, 16, 2), (8, 16, 1, 1)]
)
def test_trials_share_the_cores_of_a_host_with_those_that_run_there_at_once(count, devices, slots, expected):
    runner = Answers("a chip", report(1.0, 1.0), count=count, devices=devices, slots=slots)
    runner.run(TrialRequest(config=Config(precision="fp32"), number=0))
    assert runner.at_once == expected


def test_the_slowest_rank_and_the_fullest_rank_count():
    done = measured("NVIDIA H100 80GB HBM3", "bf16")
    assert (done.step_ms, done.tokens_per_second) == (250.0, pytest.approx(8192 / 0.25))
    assert done.peak_memory_mib == 5000
    assert [each.peak_memory_mib for each in done.ranks] == [5000, 3000]


def test_deviating_trials_are_wrong_and_incomparable_ones_say_so():
    alike = measured("a new chip", "fp32")
    assert (alike.status, alike.reason) == (Status.OK, "")
    assert alike.probe.quiet.gradient == pytest.approx(3.0, rel=1e-15)

    def against(**values):
        probe = replace(alike.probe, **values)
        request = TrialRequest(config=Config(precision="fp32"), number=1, reference=probe)
        return Answers("a new chip", report(200.0, 5000.0), report(250.0, 3000.0)).run(request)

    wrong = against(quiet=replace(alike.probe.quiet, gradient=2.0))
    assert wrong.status is Status.WRONG
    assert wrong.reason.startswith("the norm of the gradient on the probe is 3, the reference's 2")
    other = against(brought=("fused.weight",), quiet=replace(alike.probe.quiet, gradient=2.0))
    assert (other.status, other.reason) == (
        Status.OK,
        "not compared with the reference, which has other weights: fused.weight",
    )


def test_mfu_is_of_the_peak_at_the_precision():
    # 1e14 operations in 0.25 s on two devices: 200 TFLOP/s each.
    assert measured("NVIDIA H100 80GB HBM3", "bf16").mfu == pytest.approx(200 / 989.4)
    assert measured("NVIDIA A100-SXM4-80GB", "fp32").mfu == pytest.approx(200 / 19.5)
    assert measured("a new chip", "bf16").mfu is None
    assert measured("a new chip", "bf16").tflops_per_device == pytest.approx(200)


@pytest.mark.parametrize(
    ("name", "memory_mib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 40_326, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 16_151, "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", 24_217, "rtx-4090"),
        ("NVIDIA H100 PCIe", 81_079, None),
        ("Tesla V100-PCIE-32GB", 32_510, None),
        ("NVIDIA A100-PCIE-40GB", 40_960, "a100-40gb"),
        ("NVIDIA RTX 6000 Ada Generation", 49_140, "rtx-6000-ada"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, None),
    ],
)
def test_a_device_is_recognised_by_what_its_driver_calls_it(name, memory_mib, expected):
    found = recognise(name, memory_mib)
    assert (found and found.name) == expected
    assert found is None or "PCIE" not in name or found.intra_node.name.startswith("PCIe")
