"""Liger-Kernel's modules in the facts of a model: kept bytes, passes over memory and kernels.

tests/training/test_liger.py compares what they keep with Liger-Kernel itself.
"""

import pytest
import redline as rl
from redline.estimator import Estimator, hardware
from redline.estimator.facts.traced import TracedFacts, trace_facts
from redline.models import flops_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("facts")


def blocks_of(facts):
    return [part for part in facts.parts if part.role == "block"]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_norms_and_gates_keep_less(folder, precision, width):
    workload = rl.workload("llama-tiny")
    plain, liger = (trace_facts(workload, precision=precision, liger=each, folder=folder) for each in (False, True))
    (before,), (after,) = blocks_of(plain), blocks_of(liger)
    assert (after.count, after.parameters, after.matmuls) == (before.count, before.parameters, before.matmuls)
    assert liger.model_flops(64) == plain.model_flops(64)
    config = workload.model.configuration()
    # A norm keeps its input in fp32, and no longer the normalised values; a gate recomputes its activation.
    assert before.saved.sequence - after.saved.sequence == pytest.approx(2 * 4 * config.hidden_size)
    assert before.saved.sharded - after.saved.sharded == pytest.approx(width * config.intermediate_size)
    assert after.kernels <= before.kernels - 2 * 4, "norms of six operators are one"
    assert after.traffic.sequence < before.traffic.sequence and after.traffic.sharded < before.traffic.sharded
    assert plain.parameters == liger.parameters and flops_of(workload).per_sample


def test_models_without_such_modules_are_traced_as_without_them(folder):
    workload = rl.workload("wide-resnet-tiny")
    plain, liger = (trace_facts(workload, precision="fp32", liger=each, folder=folder) for each in (False, True))
    assert plain == liger


def test_only_kernels_without_compiled_blocks_are_traced_with_them(folder, monkeypatch):
    from redline.estimator.facts import traced

    steps, original = [], traced.trace_step

    def trace_step(*args, **options):
        steps.append(options["liger"])
        return original(*args, **options)

    monkeypatch.setattr(traced, "trace_step", trace_step)
    source = TracedFacts(rl.workload("llama-tiny", seq_len=32), liger=True, folder=folder)
    facts = {
        (fusion, kernels): source.facts(precision="bf16", attention="sdpa", fusion=fusion, kernels=kernels)
        for fusion in (False, True)
        for kernels in (False, True)
    }
    assert steps == [False, True]
    assert blocks_of(facts[False, True]) != blocks_of(facts[False, False])
    assert blocks_of(facts[True, True]) == blocks_of(facts[True, False])
    assert facts[False, True].kernels and not facts[False, False].kernels
    without = TracedFacts(source.workload, liger=False, folder=folder)
    assert blocks_of(without.facts(precision="bf16", attention="sdpa", fusion=False, kernels=True)) == blocks_of(
        facts[False, False]
    )


def test_the_estimate_has_them_on_gpus_where_they_are_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"precision": "bf16", "kernels": True, "fusion": False, "micro_batch": 4}
    gpu = hardware.DEVICES["h100-80gb"]
    cpu = gpu.replace(name="this-cpu", kind="cpu", cores=2)
    found = {}
    for installed in (False, True):
        monkeypatch.setattr(hardware, "liger_obstacle", lambda kind, there=installed: None if there else "missing")
        for device in (gpu, cpu):
            estimator = Estimator("llama-tiny", device)
            assert estimator.source.liger is (installed and device is gpu)
            found[installed, device.kind] = estimator(config)
    without, there = found[False, gpu.kind], found[True, gpu.kind]
    assert there.peak_memory_mib < without.peak_memory_mib and there.step_ms < without.step_ms
    assert found[False, "cpu"].peak_memory_mib == found[True, "cpu"].peak_memory_mib
