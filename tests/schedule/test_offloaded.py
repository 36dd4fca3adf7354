"""An optimizer in host memory moves each gradient out and each weight in once, and synchronizes once a step."""

from types import SimpleNamespace

import pytest
import torch
from redline.estimator import Estimator, TrainingSetup
from redline.runners.trial import rank
from redline.runners.trial.job import Job
from redline.schedule import offloaded
from redline.schedule.offloaded import OffloadedOptimizer
from torch import nn


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def trained(model, optimizer, steps=3, on_step=lambda model, step: None):
    for step in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(model, step)
    return [each.detach().clone() for each in model.parameters()]


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


class Copies:
    """Counts bytes by direction: from the model's parameters and gradients, and to its parameters."""

    def __init__(self, monkeypatch, model):
        self.out = self.back = 0
        self.blocking = []
        params = {each.data_ptr(): each for each in model.parameters()}
        real = torch.Tensor.copy_

        def copy_(tensor, source, non_blocking=False):
            size = source.numel() * source.itemsize
            if source.dtype == torch.bool:  # the flags of changed weights
                return real(tensor, source, non_blocking)
            if tensor.data_ptr() in params:
                self.back += size
            else:
                self.out += size
            self.blocking.append(not non_blocking)
            return real(tensor, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)


def test_a_step_moves_gradients_out_and_weights_in_once_without_blocking(monkeypatch):
    model = made()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    size = sum(each.numel() * each.itemsize for each in model.parameters())
    copies = Copies(monkeypatch, model)
    trained(model, optimizer, steps=2)
    assert (copies.out, copies.back) == (2 * size, 2 * size) and not any(copies.blocking)


def test_the_estimate_moves_as_much():
    made = Estimator({"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000}, "h100", TrainingSetup(seq_len=64))
    there = {
        name: made({"micro_batch": 1, "offload": name, "precision": "fp32"}).breakdown["time.offload"]
        for name in ("none", "optimizer")
    }
    parameters = sum(each.parameters * each.count for each in made.facts("fp32", "sdpa", False).parts)
    moved, states = 8 * parameters, (16 + 12) * parameters
    slowest = moved / (made.hardware.host_gb_per_s * 1e6) + states / (made.constants.host_update_gb_per_s * 1e6)
    assert there["none"] == 0 and moved / (made.hardware.host_gb_per_s * 1e6) < there["optimizer"] <= 1.2 * slowest


def test_weights_changed_on_the_device_are_what_the_next_step_begins_with():
    def halved(model, step):
        with torch.no_grad():
            if step == 0:
                model[0].weight.mul_(0.5)  # changed in place
                model[0].bias.data.add_(1e-3)  # without a change of version
            else:
                model[1].weight.data = model[1].weight.detach() * 0.5  # other memory

    plain, other = made(), made()
    expected = trained(plain, adamw(plain.parameters()), on_step=halved)
    found = trained(other, OffloadedOptimizer(other.parameters(), adamw), on_step=halved)
    assert all(map(torch.equal, expected, found))


def test_gradients_keep_their_room_from_step_to_step():
    model = made()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    places = []
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        places.append([host.grad.data_ptr() for _, host in optimizer.pairs])
        optimizer.zero_grad()
    assert places[0] == places[1]


def test_fsdp_shards_are_stepped_and_loaded_one_by_one(two):
    def check():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        results = []
        for wrap in (adamw, lambda params: OffloadedOptimizer(params, adamw)):
            model = fully_shard(made(), mesh=mesh)
            optimizer = wrap(list(model.parameters()))

            def loaded(model, step):
                for each in model.parameters():
                    each.detach().to_local().mul_(0.5)

            trained(model, optimizer, on_step=loaded)
            results.append([each.full_tensor() for each in model.parameters()])
        assert dist.get_world_size() == 2
        return all(map(torch.equal, *results))

    assert two.run(check) == [True, True]


@pytest.mark.gpu
def test_on_a_gpu_it_steps_as_the_device_would_by_pinned_memory():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain, other = made().cuda(), made().cuda()
    optimizer = OffloadedOptimizer(other.parameters(), adamw)
    for model, each in ((plain, adamw(plain.parameters())), (other, optimizer)):
        for _ in range(3):
            model(torch.ones(2, 4, device="cuda")).square().sum().backward()
            each.step()
            each.zero_grad()
    assert all(host.is_pinned() for _, host in optimizer.pairs)
    for expected, found in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_copies_of_cuda_tensors_are_pinned_and_waited_for_once(monkeypatch):
    rooms, waits = [], []
    monkeypatch.setattr(offloaded.torch, "empty_like", lambda tensor, **given: rooms.append(given))
    offloaded._host_like(SimpleNamespace(device=torch.device("cuda", 1)))
    offloaded._host_like(torch.ones(1))
    assert [each["pin_memory"] for each in rooms] == [True, False]
    monkeypatch.undo()

    model = made()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    gpu = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(offloaded, "local", lambda param: gpu)
    stream = SimpleNamespace(synchronize=lambda: waits.append("synchronised"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device.index == 1 else None)
    optimizer._wait()
    assert waits == ["synchronised"]


@pytest.mark.parametrize(("ranks", "at_once", "cores", "each"), [(4, 1, 32, 8), (8, 1, 4, 1), (2, 4, 32, 4)])
def test_ranks_on_gpus_share_the_cores(monkeypatch, ranks, at_once, cores, each):
    """Ray starts its workers with OMP_NUM_THREADS=1, so one thread would update all offloaded states."""
    asked = []
    monkeypatch.setattr(rank, "usable_cores", lambda: cores)
    monkeypatch.setattr(rank, "share_compile_threads", lambda ranks: None)
    monkeypatch.setattr(rank, "CudaMemoryMeter", lambda devices: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", asked.append)
        rank._prepare_torch(Job(program=b"", ranks=ranks, at_once=at_once, device_type="cuda"), 0)
        rank._prepare_torch(Job(program=b"", ranks=ranks, device_type="cuda", threads=3), 0)
    assert asked == [each, 3]
