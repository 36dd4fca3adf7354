"""A default global batch is divisible among the devices; one that the user chose is kept, and a space of the user's has
knobs that something reads.
"""

import pytest
import torch
from hypothesis import given, strategies as st
from redline.base.device import Device
from redline.base.errors import SpaceError, UsageError
from redline.models import Workload, list_presets, workload
from redline.models.request import TrainingRequest, resolve
from redline.models.samples import shareable, shared
from redline.models.spaces import default_space
from redline.space import Space

CPU = Device(type="cpu", name="a CPU", count=1, memory_mib=8192)


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
    made, notes = shared(workload("gpt2-tiny"), 6, target="gpt2-tiny", requested=None)
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
    made, notes = shared(own, 8, target=own, requested=None)
    assert made is own and "the global batch of 4 is less than the 8 devices" in notes[0]
    file = tmp_path / "train.py"
    file.write_text(
        "import redline as rl, torch\nfrom torch import nn\n"
        "own = rl.Workload(model=lambda: nn.Linear(4, 4), batch=lambda size, seed: (torch.ones(size, 4),),\n"
        "                  loss=lambda output, batch: output.mean(), global_batch=4)\n"
    )
    target = f"{file}:own"
    made, _ = shared(workload(target), 8, target=target, requested=None)
    assert made.global_batch == 4


def own_space(*accumulation, micro_batches=(8, 16, 32)):
    space = Space()
    micro = space.choice("micro_batch", micro_batches)
    if len(accumulation) == 1:
        space.derive("grad_accum", accumulation[0] // micro)
    else:
        space.choice("grad_accum", accumulation)
    return space


def notes_of(space, **request):
    return resolve(TrainingRequest(mlp(), space=space, **request), CPU, 1).notes


def mlp(**options):
    return Workload(
        model=options.pop("model", lambda: torch.nn.Linear(4, 1)),
        batch=lambda size, seed: (torch.zeros(size, 4), torch.zeros(size, 1)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        global_batch=32,
        name="mlp",
        **options,
    )


@pytest.mark.parametrize(
    ("accumulation", "note"),
    [
        ((32,), None),
        ((16,), "no configuration has the workload's"),
        ((1, 2), "2 of 6 configurations have the workload's"),
    ],
)
def test_other_samples_of_a_step_in_a_user_s_space_are_noted(accumulation, note):
    notes = notes_of(own_space(*accumulation))
    assert notes == () if note is None else note in notes[0]


def test_a_requested_global_batch_that_no_configuration_has_is_refused():
    with pytest.raises(UsageError, match=r"no configuration of the space has micro_batch \* dp \* grad_accum = 128"):
        notes_of(own_space(16), global_batch=128)
    assert notes_of(own_space(128), global_batch=128) == ()


def test_a_knob_that_nothing_reads_is_refused():
    space = own_space(32)
    space.choice("precison", ["fp32", "bf16"])
    with pytest.raises(SpaceError, match="'precison' of the space would have no effect; did you mean 'precision'"):
        notes_of(space)
    reads = mlp(model=lambda config: torch.nn.Linear(4, 1))
    (note,) = resolve(TrainingRequest(reads, space=space), CPU, 1).notes
    assert note == "the knob 'precison' has no standard meaning; did you mean 'precision'?"
    with pytest.raises(SpaceError, match="no function of gpt2-tiny takes the configuration"):
        resolve(TrainingRequest("gpt2-tiny", space=space), CPU, 1)
