"""An error in one pipeline stage, while the others wait for its values: it is the reason, soon, and what the log ends with."""

import sys
import time

import cloudpickle
import pytest
import torch
from redline.base.device import detect
from redline.models import Workload
from redline.results import Status
from redline.runners.dispatch import DryRuns
from redline.runners.place.local import LocalRunner
from redline.runners.runner import TrialRequest, TrialTerms
from redline.runners.trial.timing import TimingPlan
from redline.space import Config
from torch import distributed, nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Broken(torch.autograd.Function):
    """Raises in the forward or the backward pass of a rank."""

    @staticmethod
    def forward(ctx, x, direction):
        ctx.direction = direction
        if direction == "forward" and distributed.is_initialized():
            raise ValueError("heads differ")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.direction == "backward" and distributed.is_initialized():
            raise ValueError("heads differ")
        return gradient, None


class Breaking(nn.Linear):
    def __init__(self, direction):
        super().__init__(4, 4)
        self.direction = direction

    def forward(self, x):
        return Broken.apply(super().forward(x), self.direction)


def model(stage, direction):
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[2 * stage] = Breaking(direction)
    return nn.Sequential(*layers)


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 4, generator=generator)


def schedule(sch, config):
    if config["pp"] > 1:
        sch["1"].cut_pipeline_stage()


@pytest.mark.parametrize(("stage", "direction"), [(0, "forward"), (1, "forward"), (0, "backward"), (1, "backward")])
def test_the_error_of_the_failing_stage_is_the_reason(kept_agent, tmp_path, stage, direction):
    workload = Workload(
        model=lambda: model(stage, direction), batch=batch, schedule=schedule, global_batch=8,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    )  # fmt: skip
    terms = TrialTerms(device=detect(), devices=2, threads=1, plan=TimingPlan(seconds=0.1))
    runner = LocalRunner(DryRuns(workload, compiles=False), terms, agent=kept_agent())
    begun = time.monotonic()
    trial = runner.run(TrialRequest(config=Config(pp=2, micro_batch=2, grad_accum=4), number=0, log=tmp_path / "0.log"))
    assert trial.status is Status.CRASH
    assert trial.reason.startswith(f"rank {stage}: ValueError: heads differ (during probe)")
    assert time.monotonic() - begun < 30, "ended at once, rather than by a time-out of the waiting stage"
    lines = [line for line in (tmp_path / "0.log").read_text().splitlines() if line.startswith(f"[rank {stage}]")]
    assert lines[-1].startswith(f"[rank {stage}] ValueError: heads differ")
