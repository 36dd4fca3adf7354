"""Measuring this machine, and the hardware file that it writes."""

import pytest
import redline as rl
from redline.base.device import Device
from redline.estimator import find_hardware, measuring
from redline.estimator.measuring import Measured, measure, this_machine


@pytest.fixture
def quick(monkeypatch):
    """Products and copies that take milliseconds."""
    monkeypatch.setattr(measuring, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(measuring, "SHORT_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(measuring, "COPY_BYTES", {"cpu": 1024**2})
    monkeypatch.setattr(measuring, "SECONDS", 0.01)


def test_measured_hardware_round_trips_through_its_file(quick, tmp_path):
    found = measure()
    assert set(found.tflops["fp32"]) == {64, 128}
    assert all(rate > 0 for rates in found.tflops.values() for rate in rates.values())
    made = found.to_hardware()
    assert made.tflops["fp32"] == pytest.approx(max(found.tflops["fp32"].values()), abs=1e-5)
    assert (made.kind, made.achievable) == ("cpu", 1.0)
    path = tmp_path / "machine.yaml"
    made.to_yaml(path)
    assert find_hardware(path) == made
    assert find_hardware(str(path)).memory_gib == made.memory_gib


def test_a_gpu_of_the_table_keeps_its_rates_and_links_and_another_has_what_was_measured():
    def of(name):
        device = Device(type="cuda", name=name, count=2, memory_mib=81_559, capability=(9, 0), features=frozenset())
        tflops = {"fp32": {4096: 50.0}, "bf16": {4096: 700.0}}
        return Measured(device=device, tflops=tflops, memory_gb_per_s=2900.0, host_gb_per_s=40.0).to_hardware()

    listed, h100 = of("NVIDIA H100 80GB HBM3"), find_hardware("h100-80gb")
    assert (listed.name, listed.tflops, listed.intra_node) == (h100.name, h100.tflops, h100.intra_node)
    assert (listed.host_gb_per_s, listed.devices_per_node) == (40.0, 2)
    other = of("NVIDIA Unheard-of")
    assert (other.tflops["bf16"], other.memory_gb_per_s, other.achievable) == (700.0, 2900.0, 1.0)
    assert other.unmeasured is not None


def test_a_gpu_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    gpu = Device(
        type="cuda", name="NVIDIA Unheard-of", count=1, memory_mib=24_000, capability=(9, 0), features=frozenset()
    )
    monkeypatch.setattr(measuring, "detect", lambda: gpu)
    monkeypatch.setattr(measuring, "measure", None)  # in this process
    assert this_machine(tmp_path).kind == "cpu", "the other process sees what there is"
    monkeypatch.setattr(measuring, "__name__", "redline.no_such_module")
    with pytest.raises(rl.RunnerError, match=r"measuring this machine failed: .*no_such_module"):
        this_machine(tmp_path / "again")


def test_this_machine_is_measured_once(quick, tmp_path, monkeypatch):
    first = this_machine(tmp_path)
    monkeypatch.setattr(measuring, "measure", None)
    assert this_machine(tmp_path) == first


def test_a_busy_machine_is_reported_and_measured_again_soon(quick, tmp_path, monkeypatch):
    timed = measuring._timed
    monkeypatch.setattr(measuring, "_timed", lambda works, *_: {name: [(1.0, 0.5)] * 9 for name in works})
    found = this_machine(tmp_path)
    assert "other processes used its cores" in found.note
    monkeypatch.setattr(measuring, "_timed", lambda works, *_: {name: [(1.0, 1.0)] * 9 for name in works})
    assert this_machine(tmp_path) == found  # it is kept for some minutes
    later = measuring.time.time() + measuring.BUSY_AGE_S + 1
    monkeypatch.setattr(measuring.time, "time", lambda: later)
    assert this_machine(tmp_path).note == ""
    later += 20 * 24 * 3600
    monkeypatch.setattr(measuring, "_timed", timed)
    monkeypatch.setattr(measuring, "measure", None)
    assert this_machine(tmp_path).note == ""  # a measurement of an idle machine is kept


def test_the_estimate_and_the_search_pass_on_that_the_machine_was_busy(quick, tmp_path, monkeypatch):
    from redline.estimator.request import estimate_request
    from redline.tuner.setup import estimator_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "_timed", lambda works, *_: {name: [(1.0, 0.5)] * 9 for name in works})
    workload, messages = rl.workload("gpt2-tiny"), []
    assert any("used its cores" in note for note in estimate_request(workload).notes)
    estimator_of(workload, rl.Space(), messages.append, devices=1, hardware=None, memory_limit_mib=None)
    assert len(messages) == 1 and "used its cores" in messages[0]


def test_calls_that_something_came_between_do_not_count():
    calls = [(1.0, 0.99), (1.1, 1.05), (0.98, 0.97), (1.02, 1.0), (5.0, 1.0), (7.0, 1.1)]
    seconds, busy = measuring._undisturbed(calls, on_cpu=True)
    assert seconds == pytest.approx(0.985, abs=0.01) and not busy
    # If all were disturbed, the shortest is the best; a GPU's thread always waits.
    assert measuring._undisturbed([(5.0, 1.0), (7.0, 1.1)], on_cpu=True) == (5.0, True)
    assert measuring._undisturbed([(1.0, 0.1)] * 8, on_cpu=False) == (1.0, False)
