"""A default global batch is divisible among the devices; one that the user chose is kept."""

import pytest
from hypothesis import given, strategies as st
from redline.base.device import Device
from redline.models import Workload, list_presets, workload
from redline.models.global_batch import shareable, shared
from redline.models.spaces import default_space


@given(usual=st.integers(1, 4096), devices=st.integers(1, 4096))
def test_every_device_gets_as_many_samples_and_no_fewer_than_usual_are_taken(usual, devices):
    total = shareable(usual, devices)
    assert total % devices == 0 and total >= max(usual, devices)
    assert total == usual or total < 2 * max(usual, devices)


@pytest.mark.parametrize(
    ("usual", "devices", "expected"), [(16, 64, 64), (32, 8, 32), (32, 24, 48), (16, 1, 16), (8, 6, 12)]
)
def test_a_device_gets_a_power_of_two(usual, devices, expected):
    assert shareable(usual, devices) == expected


def test_a_preset_s_batch_is_kept_on_as_many_devices_as_divide_it():
    for each in list_presets():
        for devices in (1, 2, 4, 8):
            assert shareable(each["global_batch"], devices) == each["global_batch"], each["name"]


def test_a_batch_that_devices_cannot_share_gives_way_to_one_they_can():
    made, notes = shared(workload("gpt2-tiny"), 6, target="gpt2-tiny", asked=None)
    assert made.global_batch == 48
    assert notes == (
        "global batch: 48, 8 samples a device, since none was given and gpt2-tiny's usual 32 cannot be "
        "shared by the 6 devices",
    )
    gpu = Device(type="cuda", name="a GPU", count=8, memory_mib=81920, capability=(9, 0))
    space = default_space(made, gpu, 6)
    assert (space.default()["dp"], space.default()["micro_batch"]) == (6, 8)


def test_a_workload_of_one_s_own_keeps_its_batch(tmp_path):
    from torch import nn

    own = Workload(
        model=lambda: nn.Linear(4, 4),
        batch=lambda size, seed: (),
        loss=lambda output, batch: 0,
        global_batch=4,
    )
    made, notes = shared(own, 8, target=own, asked=None)
    assert made is own and "the global batch of 4 is less than the 8 devices" in notes[0]
    file = tmp_path / "train.py"
    file.write_text(
        "import redline as rl, torch\nfrom torch import nn\n"
        "own = rl.Workload(model=lambda: nn.Linear(4, 4), batch=lambda size, seed: (torch.ones(size, 4),),\n"
        "                  loss=lambda output, batch: output.mean(), global_batch=4)\n"
    )
    target = f"{file}:own"
    made, _ = shared(workload(target), 8, target=target, asked=None)
    assert made.global_batch == 4
