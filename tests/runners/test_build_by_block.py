"""A model larger than a rank's memory is built piece by piece: building takes less memory than training."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from redline.base.device import detect
from redline.estimator import Estimator, TrainingSetup
from redline.models import Workload
from redline.results import Status
from redline.runners.dispatch import DryRuns
from redline.runners.host.client import PLAIN_IMPORTS, HostAgent
from redline.runners.place.local import LocalRunner
from redline.runners.runner import TrialRequest, TrialTerms
from redline.runners.trial.timing import TimingPlan
from redline.schedule import build, create_schedule, materialise
from redline.space import Config
from redline.training import Training
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, BLOCKS = 2048, 12
BLOCK_MIB = 4 * WIDTH**2 / 2**20
WHOLE_MIB = BLOCKS * BLOCK_MIB


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()


class Stack(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(size, seed):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)), torch.zeros(size, 1)


def loss(output, given):
    return (output.float() - given[1]).square().mean()


def sgd(params):
    return torch.optim.SGD(params, lr=1e-9)


def without_memory(width, blocks):
    """A model that its layers' own rules initialise."""
    with torch.device("meta"):
        return Stack(width, blocks)


def workload():
    return Workload(model=lambda: without_memory(WIDTH, BLOCKS), batch=batch, loss=loss, optimizer=sgd, global_batch=4)


@pytest.fixture(scope="module")
def agent():
    """An agent whose ranks return freed memory at once: glibc otherwise keeps aligned pieces that nothing later fits into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
        made = HostAgent(PLAIN_IMPORTS)
    yield made
    made.close()


def ran(agent, config, *, devices=1, limit_mib=None):
    terms = TrialTerms(
        device=detect(), devices=devices, memory_limit_mib=limit_mib, threads=1, plan=TimingPlan(seconds=0.1)
    )
    runner = LocalRunner(DryRuns(workload(), compiles=False), terms, agent=agent)
    return runner.run(TrialRequest(config=Config(config), number=0))


@pytest.mark.slow
def test_replicas_train_a_model_whose_whole_none_of_them_may_hold(agent):
    limit_mib = 0.9 * WHOLE_MIB
    config = {"dp": 2, "zero": 3, "precision": "bf16_pure", "micro_batch": 2}
    found = ran(agent, config, devices=2, limit_mib=limit_mib)
    assert found.ok, found.reason
    for rank in found.ranks:
        # A quarter of the float32 weights, one block while it is drawn and cut, and the process's own memory.
        assert rank.build_memory_mib < WHOLE_MIB / 4 + 2.5 * BLOCK_MIB + 20
        assert rank.build_memory_mib < rank.peak_memory_mib + BLOCK_MIB
    alone = ran(agent, {"precision": "fp32", "micro_batch": 4}, limit_mib=limit_mib)
    assert alone.status is Status.OOM and "during build" in alone.reason


def test_weights_without_a_float32_copy_never_have_one(agent):
    (rank,) = ran(agent, {"precision": "bf16_pure", "micro_batch": 4}).ranks
    assert rank.build_memory_mib < WHOLE_MIB / 2 + BLOCK_MIB + 20
    (rank,) = ran(agent, {"precision": "fp32", "micro_batch": 4}).ranks
    assert rank.build_memory_mib > WHOLE_MIB


def test_a_part_is_cast_and_cut_before_the_next_is_made(monkeypatch):
    """Records the weights that exist each time memory is allocated."""
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])

        def forward(self, x):
            return x

    with torch.device("meta"):
        model = Watched()
    sch = create_schedule(model)
    sch.cast(torch.bfloat16)
    allocate = materialise._Values.allocate

    def allocated(self, key):
        seen.append([each.weight.dtype if not each.weight.is_meta else None for each in model.parts])
        allocate(self, key)

    monkeypatch.setattr(materialise._Values, "allocate", allocated)
    build(sch)
    half = torch.bfloat16
    assert seen == [[None, None, None], [half, None, None], [half, half, None]]


def test_the_estimate_has_what_building_takes_beyond_training():
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 128_000}
    made = Estimator(shape, "h100", TrainingSetup(devices=8, seq_len=16, global_batch=8, optimizer="sgd"))
    found = {zero: made({"dp": 8, "zero": zero, "micro_batch": 1, "precision": "bf16"}).breakdown for zero in (0, 3)}
    assert found[0]["memory.build"] == 0  # gradients need as much memory as the weights
    pieces, ends, block = 6.44e9 / 8 + 1.05e9 / 8, 2 * 128_000 * 4096, 12 * 4096**2
    expected = (pieces + ends + block) * 4 / 2**20
    rest = sum(value for name, value in found[3].items() if name.startswith("memory.") and name != "memory.build")
    assert np.isclose(rest + found[3]["memory.build"], max(rest, expected), rtol=0.05)


@pytest.mark.gpu
def test_on_a_gpu_weights_without_a_float32_copy_never_have_one():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    torch.cuda.init()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    training = Training(workload(), {"precision": "bf16_pure", "micro_batch": 4}, device)
    peak_mib = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    assert next(training.model.parameters()).dtype == torch.bfloat16
    assert peak_mib < WHOLE_MIB / 2 + BLOCK_MIB + 20
