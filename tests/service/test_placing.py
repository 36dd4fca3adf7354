"""Placement of a search on the workers' devices, and the reasons why one waits."""

import json
from dataclasses import replace

import pytest
from pools import DEVICE, GPU, a_store
from redline.base.device import Device
from redline.estimator import Hardware
from redline.service.placing import Placed, described, obstacle, place


@pytest.fixture
def store(tmp_path):
    made, user = a_store(tmp_path)
    with made:
        made.ann = user
        yield made


def joined(store, device, devices, memory_mib=None, name="w"):
    return store.join(
        store.ann, name, "here", device.to_dict(), devices, memory_mib or device.memory_mib, {"torch": "2"}
    )


def a_search(store, devices=1, device="", **request):
    return store.submit(store.ann, {"target": "gpt2-tiny", **request}, devices=devices, device=device)[0]


@pytest.mark.parametrize(
    "device", [DEVICE, GPU, Device(type="cpu", name="x", count=1, memory_mib=1, features=frozenset({"bf16"}))]
)
def test_a_device_travels_without_loss(device):
    assert Device.from_dict(json.loads(json.dumps({**device.to_dict(), "hardware": {}}))) == device


def test_a_search_runs_where_there_are_most_devices_and_within_the_least_memory(store):
    joined(store, GPU, 4)
    joined(store, DEVICE, 2, 3000)
    joined(store, DEVICE, 3, 2000)
    placed = place(a_search(store), store.workers())
    assert (placed.device.name, placed.workers_devices, placed.memory_limit_mib) == ("a CPU", 5, 2000.0)
    assert Placed.from_dict(json.loads(json.dumps(placed.to_dict()))) == placed


@pytest.mark.parametrize(
    "strange",
    [{"type": "cpu"}, {"count": "many"}, {"capability": 9}, {"hardware": {"base": "/etc/x.yaml"}}, {"hardware": 3}],
)
def test_a_worker_whose_description_is_none_fails_no_search(store, strange):
    """It has the most devices and the least memory, so that it would be chosen first."""
    joined(store, DEVICE, 2, 3000)
    description = {**DEVICE.to_dict(), **strange}
    if strange == {"type": "cpu"}:
        del description["memory_mib"]
    store.join(store.ann, "odd", "there", description, 64, 1000, {})
    placed = place(a_search(store), store.workers())
    assert (placed.workers_devices, placed.memory_limit_mib) == (2, 3000.0)
    assert placed.machine() is None


def test_the_memory_of_a_gpu_is_its_own(store):
    joined(store, GPU, 8)
    assert place(a_search(store), store.workers()).memory_limit_mib is None


def test_a_search_for_a_kind_of_device_gets_that(store):
    joined(store, GPU, 2)
    joined(store, DEVICE, 64)
    assert place(a_search(store, device="h100"), store.workers()).device.name == "H100"
    assert place(a_search(store, device="cuda"), store.workers()).device.name == "H100"


def test_the_reason_why_a_search_waits_is_given(store):
    assert obstacle(a_search(store), store.workers()) == "no worker is in the pool"
    joined(store, GPU, 2)
    gone = joined(store, DEVICE, 64)
    assert obstacle(a_search(store, devices=4, device="H100"), store.workers()) == (
        "a dry run takes 4 devices of one worker, and none has more than 2"
    )
    store.leave(gone.id)
    assert obstacle(a_search(store, device="B200"), store.workers()) == "no worker has 'B200'; there are H100"
    assert place(a_search(store, device="B200"), store.workers()) is None
    assert obstacle(a_search(store), store.workers()) == ""


def test_a_simulated_search_needs_no_worker(store):
    assert obstacle(a_search(store, runner="simulate", hardware="H100", devices=512), []) == ""


def test_a_worker_says_what_hardware_it_is_and_others_read_it():
    description, memory_mib = described(2)
    device, hardware = Device.from_dict(description), json.loads(json.dumps(description["hardware"]))
    placed = Placed(device=device, hardware=hardware, memory_limit_mib=None, software={}, workers_devices=2)
    assert isinstance(placed.machine(), Hardware)
    assert placed.machine().memory_mib == pytest.approx(memory_mib)
    assert replace(placed, hardware=None).machine() is None
