"""A rank's traced memory over a step: the allocator's peaks, the roles at the peak, and the named tensors."""

import pytest
import redline as rl
from redline.base.errors import UsageError, WorkloadError
from redline.estimator.allocator import MIB, CachingAllocator
from redline.runners.memory_timeline import (
    PROCESS_MIB,
    PRODUCTS_MIB,
    SMALL_MIB,
    memory_timeline,
    resident_bytes,
    timeline_of,
    traceable,
)
from redline.training.memory_trace import Block, MemoryTrace, Phase, PhaseEvents, Role


def block(num_bytes, begin, end, role=Role.ACTIVATION, name="layer: mm", stream=0):
    return Block(num_bytes, begin, end, role, name, (num_bytes // 4,), "float32", stream)


PARTS = (PhaseEvents(Phase.BUILD, -1, 0), PhaseEvents(Phase.FORWARD, 0, 1), PhaseEvents(Phase.BACKWARD, 0, 3))
TRACE = MemoryTrace(
    rank=0,
    blocks=(
        block(3 * MIB, 0, None, Role.PARAMETER, "weight"),
        block(30 * MIB, 1, 4),
        block(1000, 2, 5, name="layer: sum"),
        block(5 * MIB, 3, 6, Role.GRADIENT, "weight"),
    ),
    parts=PARTS,
    num_events=7,
    messages=0,
    groups=0,
)


def test_the_peak_its_roles_and_its_tensors_follow_from_the_blocks():
    found = timeline_of(TRACE, "cuda")
    assert found.live_bytes == 38 * MIB + 1000
    assert found.allocated_bytes == 38 * MIB + 1024
    assert found.reserved_bytes == (20 + 30 + 2) * MIB  # 3 and 5 MiB share a segment
    assert found.expandable_bytes == (40 + 2) * MIB  # 38 MiB in units of 20
    assert found.phase == "backward"
    assert list(found.roles.items()) == [
        ("activations", 30 * MIB + 1000), ("gradients", 5 * MIB), ("parameters", 3 * MIB)
    ]  # fmt: skip
    assert [each.num_bytes for each in found.largest] == [30 * MIB, 5 * MIB, 3 * MIB, 1000]


def test_the_course_has_the_phases_of_the_last_step():
    found = timeline_of(TRACE, "cuda")
    assert [each.phase for each in found.points] == ["forward"] * 2 + ["backward"] * 4
    assert max(each.live_bytes for each in found.points) == found.live_bytes
    assert found.points[-1].live_bytes == 3 * MIB


def test_the_resident_set_has_pages_and_what_libraries_take():
    mapped = (3 + 30 + 5) * MIB + 3 * 4096  # a page more for header and alignment
    beside = PROCESS_MIB + SMALL_MIB + PRODUCTS_MIB
    assert resident_bytes(TRACE) == mapped + 1080 + round(beside * MIB)
    assert timeline_of(TRACE, "cpu").expandable_bytes is None


def test_cuda_keeps_masks_of_dropout_and_gloo_copies_belong_to_cpus():
    workload = rl.workload("gpt2-tiny", global_batch=8)
    config = {"micro_batch": 2, "zero": 2}
    on = {kind: memory_timeline(workload, config, devices=2, kind=kind) for kind in ("cuda", "cpu")}
    assert on["cuda"].live_bytes != on["cpu"].live_bytes
    assert on["cuda"].reserved_bytes % (2 * MIB) == 0
    assert on["cuda"].roles["parameters"] == on["cpu"].roles["parameters"]
    document = on["cuda"].to_dict()
    assert document["largest"][0]["bytes"] >= document["largest"][-1]["bytes"]
    assert sum(document["at_peak"].values()) == document["peak_live_bytes"]


def test_recomputation_runs_with_the_operators_of_the_device():
    workload = rl.workload("llama-tiny", global_batch=8)
    whole, less = (
        memory_timeline(workload, {"micro_batch": 2, "checkpoint_ratio": ratio, "precision": "bf16"}).live_bytes
        for ratio in (0, 1)
    )
    assert less < whole


def test_knobs_that_a_cpu_lacks_are_traced_as_what_is_alike_or_left_out():
    config = {"fusion": True, "kernels": True, "precision": "fp8", "attention": "flash_attention_2"}
    assert traceable(config, "cuda") == (
        {"fusion": False, "kernels": True, "precision": "bf16", "attention": "sdpa"},
        ["fusion", "precision"],
    )
    assert traceable({"precision": "tf32"}, "cuda") == ({"precision": "fp32"}, [])


def test_kernels_keep_no_logits_and_on_gpus_less_of_norms_and_gates(monkeypatch):
    workload = rl.workload("llama-tiny", global_batch=8)
    peaks = {}
    for installed in (False, True):
        monkeypatch.setattr(
            "redline.runners.memory_timeline.liger_obstacle", lambda kind, there=installed: "" if there else "missing"
        )
        for kind in ("cuda", "cpu"):
            for kernels in (False, True):
                config = {"micro_batch": 8, "precision": "bf16", "kernels": kernels}
                peaks[installed, kind, kernels] = memory_timeline(workload, config, kind=kind).live_bytes
    assert peaks[True, "cuda", True] < peaks[False, "cuda", True] < peaks[False, "cuda", False]
    assert peaks[True, "cuda", False] == peaks[False, "cuda", False]
    assert peaks[True, "cpu", True] == peaks[False, "cpu", True] < peaks[False, "cpu", False]


def test_requests_that_cannot_be_traced_are_refused():
    workload = rl.workload("llama-tiny", global_batch=8)
    with pytest.raises(UsageError, match="the kind of device is 'tpu'"):
        memory_timeline(workload, {}, kind="tpu")
    with pytest.raises(UsageError, match="offload=optimizer: memory of offloaded states cannot be traced"):
        memory_timeline(workload, {"offload": "optimizer"})
    with pytest.raises(WorkloadError, match="rank must be from 0 to 0, but is 1"):
        memory_timeline(workload, {"micro_batch": 2}, rank=1)


def test_replay_frees_what_it_allocates():
    allocator = CachingAllocator()
    from redline.runners.memory_timeline import replayed

    replayed(TRACE, allocator)
    assert allocator.allocated == 3 * MIB
