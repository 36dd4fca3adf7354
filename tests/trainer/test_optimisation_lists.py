"""Strategies in ATorch's form are converted to knobs; entries without a knob are named."""

import pytest
import redline
import torch
from redline.base.errors import UsageError
from redline.trainer.accelerate import api
from redline.trainer.accelerate.api import StrategyRequest, decide
from redline.trainer.accelerate.optimisations import NEUTRAL, follow

LISTS = {
    "nothing": ([], {}),
    "replicas": (["parallel_mode"], {}),
    "degrees": ([("parallel_mode", ([("data", 2), ("tensor", 4)], None))], {"tp": 4, "dp": 2, "pp": 1}),
    "stages": ([("parallel_mode", ([("pipe", 2), ("data", 4)], None))], {"tp": 1, "dp": 4, "pp": 2}),
    "fsdp": (["fsdp"], {"zero": 3}),
    "fsdp by name": ([("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"})], {"zero": 2}),
    "zero": (["zero1"], {"zero": 1}),
    "bf16": ([("amp_native", {"dtype": torch.bfloat16})], {"precision": "bf16"}),
    "bf16 as text": ([("amp_native", {"dtype": "bf16"})], {"precision": "bf16"}),
    "fp16": (["amp_native"], {"precision": "fp16"}),
    "apex": ([("amp_apex", {"opt_level": "O1"})], {"precision": "fp16"}),
    "half": ([("half", "bf16")], {"precision": "bf16_pure"}),
    "checkpoint": (["checkpoint"], {"checkpoint_ratio": 1.0}),
    "kernels": (["module_replace"], {"kernels": True}),
    "all devices": (["tensor_parallel"], {"tp": 8}),
    "some devices": ([("tensor_parallel", {"size": 2})], {"tp": 2}),
    "degrees first": (
        ["tensor_parallel", "zero1", ("parallel_mode", ([("tensor", 2), ("data", 4)], None))],
        {"tp": 2, "dp": 4, "pp": 1, "zero": 1},
    ),
    "sequences": (
        [("parallel_mode", ([("sequence", 2), ("data", 4)], None))],
        {"tp": 1, "sp": 2, "dp": 4, "pp": 1},
    ),
    "together": (
        ["parallel_mode", "module_replace", ("fsdp", {"sync_module_states": True}), ("half", "bf16"), "checkpoint"],
        {"zero": 3, "kernels": True, "precision": "bf16_pure", "checkpoint_ratio": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_converted_to_knobs(name):
    strategy, knobs = LISTS[name]
    found = follow(strategy, 8)
    assert found.knobs == {**NEUTRAL, **knobs}
    assert found.notes == []


def test_tunable_entries_are_left_to_the_search():
    found = follow([("zero2", None, True), ("checkpoint", None, False)], 8)
    assert "zero" not in found.knobs
    assert found.knobs["checkpoint_ratio"] == 1.0


NOTED = {
    "classes": (("checkpoint", ("Block",)), "checkpoint: every repeated block"),
    "offload": (("fsdp", {"cpu_offload": True}), "offload=optimizer), not the weights"),
    "more of fsdp": (
        ("fsdp", {"limit_all_gathers": True}),
        "fsdp: limit_all_gathers of its configuration has no counterpart",
    ),
    "float16 weights": (("half", "fp16"), "weights stay in float32"),
}


@pytest.mark.parametrize("name", NOTED)
def test_dropped_entries_are_reported(name):
    entry, message = NOTED[name]
    (note,) = follow([entry], 8).notes
    assert message in note


REFUSED = {
    "a name": (["zerro1"], "unknown optimisation 'zerro1'; did you mean 'zero1'?"),
    "an entry": ([("zero1", None, False, 4)], "an entry of a strategy must be a name"),
    "degrees": ([("parallel_mode", ([("data", 3)], None))], "parallel_mode is for 3 devices .data 3., but there are 8"),
    "an axis": ([("parallel_mode", ([("dat", 8)], None))], "unknown axis of parallel_mode 'dat'; did you mean 'data'"),
    "a form": ([("parallel_mode", {"data": 8})], "parallel_mode takes"),
    "a format": ([("amp_native", {"dtype": "fp12"})], "unknown dtype of amp_native 'fp12'"),
    "a share": ([("tensor_parallel", 3)], "tensor_parallel over 3 devices does not divide the 8"),
    "a strategy": ([("fsdp", {"sharding_strategy": "ALL"})], "unknown sharding_strategy of fsdp 'ALL'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_lists_are_refused(name):
    strategy, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        follow(strategy, 8)


def test_open_knobs_of_a_list_are_planned():
    info = redline.accelerate(
        "llama-tiny", strategy=["zero1", ("amp_native", {"dtype": "bf16"}), "checkpoint"], seq_len=32
    ).info
    assert (info.config["precision"], info.config["checkpoint_ratio"], info.config["fusion"]) == ("bf16", 1.0, False)
    assert info.config["micro_batch"] * info.config["grad_accum"] == info.samples_per_step
    assert info.why.startswith("the list of optimisations; the estimate's best of")


def test_entries_that_the_model_does_not_support_are_reported():
    info = redline.accelerate("llama-tiny", strategy=["module_replace"], seq_len=32).info
    if "kernels" not in info.config:  # a CPU has none
        assert any(note.startswith("kernels=true is not followed") for note in info.notes)


@pytest.mark.parametrize(("strategy", "message"), [
    (["sequence_parallel"], "sequence_parallel=true is not followed: it has no effect with tp=1 pp=1 dp=2"),
    (["zero3", "tensor_parallel"], "zero=3 is not followed: it has no effect with tp=2 pp=1 dp=1"),
])  # fmt: skip
def test_entries_without_effect_are_reported(strategy, message):
    workload = redline.workload("llama-tiny", seq_len=32)
    assert decide(workload, StrategyRequest(strategy=strategy), 2).notes == (message,)
    here = decide(workload, StrategyRequest(strategy=["tensor_parallel", "sequence_parallel"]), 2)
    assert here.config["sequence_parallel"] is True and here.notes == ()


def test_unsupported_number_formats_are_refused_with_the_supported_ones(monkeypatch):
    from redline.base.device import Device

    plain = Device(type="cpu", name="a CPU without bfloat16", count=1, memory_mib=8000)
    monkeypatch.setattr(api, "detect", lambda: plain)
    for entry, value in (("amp_native", "fp16"), ("half", "fp16"), ("fp8", "fp8")):
        with pytest.raises(UsageError) as refused:
            redline.accelerate("llama-tiny", strategy=[entry], seq_len=32)
        assert str(refused.value) == (
            f'the list of optimisations requires precision="{value}", which llama-tiny cannot have on 1 device of this kind; '
            "name another one, as by ('amp_native', {'dtype': 'bf16'}). There are: fp32"
        )
