"""Workloads whose samples of a micro-batch are mixed: other micro-batches are other trainings, and not in a default space."""

import pytest
import torch
from redline.base.device import Device
from redline.models import Workload
from redline.models.request import TrainingRequest, resolve
from redline.models.samples import mixing_of
from redline.models.spaces import default_space, lossy_of_space
from torch import nn

CPU = Device(type="cpu", name="CPU", count=2, memory_mib=8192)


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x):
        return x - x.mean(0)


def images(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def workload(middle, loss=None):
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 16), middle(), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4)),
        batch=images,
        loss=loss or (lambda output, batch: nn.functional.cross_entropy(output, batch[1])),
    )


def batch_norm():
    return nn.BatchNorm1d(16)


def layer_norm():
    return nn.LayerNorm(16)


def contrastive(output, batch):
    """Compares each sample's output with its neighbours'."""
    return nn.functional.cross_entropy(output @ output.t(), torch.arange(len(output)))


@pytest.mark.parametrize(
    ("made", "mixes"),
    [
        (workload(batch_norm), "BatchNorm1d '1' takes statistics over a micro-batch"),
        (workload(Centred), "the loss of two samples is not a sum"),
        (workload(layer_norm, contrastive), "the loss of two samples is not a sum"),
        (workload(layer_norm), None),
        (workload(lambda: nn.BatchNorm1d(16).requires_grad_(False)), "BatchNorm1d '1'"),
    ],
    ids=["batch norm", "centred", "contrastive", "none", "frozen"],
)
def test_the_micro_batch_varies_only_where_it_is_the_same_training(made, mixes):
    space = default_space(made, CPU)
    reason = mixing_of(made).reason
    assert reason.startswith(mixes) if mixes else reason is None
    assert list(space["micro_batch"].values) == ([8] if mixes else [1, 2, 4, 8, 16, 32])
    allowed = default_space(made, CPU, allow=("lossy",))
    assert list(allowed["micro_batch"].values) == [1, 2, 4, 8, 16, 32]
    assert lossy_of_space(allowed).get("micro_batch", []) == ([1, 2, 4, 16, 32] if mixes else [])


def test_requested_values_are_marked_and_noted():
    found = resolve(TrainingRequest(workload(batch_norm), override={"micro_batch": [4, 8, 16]}), CPU, 1)
    assert lossy_of_space(found.space) == {"micro_batch": [4, 16]}
    assert any("micro_batch=4, 16 trains differently from 8" in note and "BatchNorm1d" in note for note in found.notes)
    fixed = resolve(TrainingRequest(workload(batch_norm), fix={"micro_batch": 16}), CPU, 1)
    assert lossy_of_space(fixed.space) == {}
    assert any("micro_batch is 16 in every trial" in note for note in fixed.notes)
    own = fixed.space.copy()
    own.override("micro_batch", [2, 8])
    own.beyond = None
    given = resolve(TrainingRequest(workload(batch_norm), space=own), CPU, 1)
    assert list(lossy_of_space(given.space)) == ["micro_batch"]


def test_statistics_over_all_replicas_fix_their_number_too():
    space = default_space(workload(lambda: nn.SyncBatchNorm(16)), CPU, 2)
    assert {config["dp"] for config in space} == {2}
    assert all(config["sp"] == config["cp"] == 1 for config in default_space(workload(batch_norm), CPU, 2))
