"""A whole search beside its estimate, and the initial estimate of a search."""

import csv

import pytest
import redline as rl
import torch
from predicted_runner import predicted
from redline.estimator import Hardware
from redline.tuner.setup import estimator_of, usable
from torch import nn

ASKED = predicted(
    "gpt2-tiny", "a100-40gb", devices=256, trials=6, patience=0, global_batch=1024,
    fix={
        "attention": "sdpa",
        "precision": "bf16",
        "fusion": False,
        "kernels": False,
        "offload": "none",
        "fused_optimizer": True,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search for 256 devices."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return rl.tune("gpt2-tiny", out=out, **ASKED), out


def test_a_search_for_many_devices_has_the_estimate_of_each_trial(finished):
    result, out = finished
    config = result.best.config
    assert config["tp"] * config["sp"] * config["cp"] * config["pp"] * config["dp"] == 256
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert len(rows) == 6
    ran = [row for row in rows if row["status"] == "ok"]
    assert len(ran) >= 4
    for row in ran:
        assert 0 < float(row["mfu"]) < 1
        assert float(row["predicted_throughput"]) > 0 and float(row["predicted_memory_mib"]) > 0
        assert row["throughput"] != row["predicted_throughput"]


class Reads(nn.Module):
    """Reads values, which a trace does not have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 4)

    def forward(self, x):
        y = self.first(x)
        return y if y.sum().item() > 0 else y * 2


def make_batch(size, seed):
    return torch.zeros(size, 16), torch.zeros(size, 4)


def make_loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


def cpu():
    """A CPU's properties as measured."""
    return Hardware.from_mapping(
        {
            "memory_gib": 4, "tflops": {"fp32": 0.1}, "memory_gb_per_s": 20, "kind": "cpu", "devices_per_node": 1,
            "intra_node": {"gb_per_s": 1, "latency_us": 100}, "inter_node": {"gb_per_s": 1, "latency_us": 100},
        },
        name="cpu", where="here",
    )  # fmt: skip


def test_an_untraceable_model_is_searched_without_an_estimate_with_one_warning():
    workload = rl.Workload(model=Reads, batch=make_batch, loss=make_loss, global_batch=8)
    space = rl.Space()
    space.choice("micro_batch", [1, 2, 4, 8])
    estimator = estimator_of(workload, space, [].append, devices=1, hardware=cpu(), memory_limit_mib=1000.0)
    messages = []
    assert usable(estimator, space, messages.append) is None
    assert len(messages) == 1
    assert "begins without an estimate" in messages[0] and "aten._local_scalar_dense" in messages[0]


def test_a_machine_that_cannot_be_measured_ends_no_search(monkeypatch):
    def fails(*_):
        raise rl.RunnerError("measuring this machine failed: no driver")

    monkeypatch.setattr("redline.estimator.request.machine_of", fails)
    messages = []
    made = estimator_of(
        rl.workload("gpt2-tiny"), rl.Space(), messages.append, devices=1, hardware=None, memory_limit_mib=None
    )
    assert made is None and messages == [
        "the search begins without an estimate: measuring this machine failed: no driver"
    ]


def test_gpus_are_not_assumed_for_trials_on_a_cpu():
    with pytest.raises(
        rl.UsageError, match="names GPUs, but this machine has none to run trials on: `redline estimate`"
    ):
        rl.tune("gpt2-tiny", trials=1, hardware="h100")
