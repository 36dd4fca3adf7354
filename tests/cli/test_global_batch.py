"""Every command takes the same global batch by default, and names it."""

from redline.estimator.hardware import find_hardware
from redline.estimator.request import estimate_request
from redline.estimator.survey import device_of
from redline.models.request import TrainingRequest
from redline.tuner.request.target import resolve_task


def test_the_commands_choose_alike_and_say_so():
    h100 = find_hardware("h100-80gb")
    searched = resolve_task(TrainingRequest("gpt2-tiny", devices=64), device=device_of(h100))
    asked = estimate_request("gpt2-tiny", h100, devices=64)
    message = (
        "global batch: 64, 1 sample a device, since none was given and gpt2-tiny's usual 32 is less than the 64 devices"
    )
    assert searched.workload.global_batch == asked.global_batch == 64
    assert asked.estimator.training.global_batch == 64
    assert message in searched.notes and message in asked.notes
    for space in (searched.space, asked.space):
        assert space.default()["dp"] == 64


def test_a_batch_that_was_asked_for_is_kept_and_one_below_the_devices_is_named():
    found = estimate_request("gpt2-tiny", "h100-80gb", devices=64, global_batch=16)
    assert found.global_batch == 16
    message = "the global batch of 16 is less than the 64 devices: at most 16 of them can be replicas"
    assert any(note.startswith(message) for note in found.notes)
    enough = estimate_request("gpt2-tiny", "h100-80gb", devices=64, global_batch=64)
    assert not [note for note in enough.notes if "batch" in note]


def test_free_accumulation_keeps_the_batch_and_names_other_trainings():
    h100 = find_hardware("h100-80gb")
    task = resolve_task(
        TrainingRequest("gpt2-tiny", devices=64, override={"grad_accum": [1, 2]}), device=device_of(h100)
    )
    (note,) = [note for note in task.notes if "batch" in note]
    assert task.workload.global_batch == 32
    assert note.endswith("configurations have the workload's global batch of 32; others are another training")
