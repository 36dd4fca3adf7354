"""Measuring this machine, and the hardware file that it writes."""

import pytest
import redline as rl
from redline.base.device import Device
from redline.estimator import find_hardware, measuring
from redline.estimator.measuring import Measured, measure, this_machine


@pytest.fixture
def quick(monkeypatch):
    """Products and copies that take milliseconds."""
    monkeypatch.setattr(measuring, "SIDE", {"cpu": 64})
    monkeypatch.setattr(measuring, "COPY_BYTES", {"cpu": 1024**2})
    monkeypatch.setattr(measuring, "SECONDS", 0.01)


def test_measured_hardware_round_trips_through_its_file(quick, tmp_path):
    found = measure()
    assert all(rate > 0 for rate in found.tflops.values())
    made = found.to_hardware()
    assert made.tflops["fp32"] == pytest.approx(found.tflops["fp32"], abs=1e-5)
    assert (made.kind, made.achievable) == ("cpu", 1.0)
    path = tmp_path / "machine.yaml"
    made.to_yaml(path)
    assert find_hardware(path) == made
    assert find_hardware(str(path)).memory_gib == made.memory_gib


def test_a_gpu_of_the_table_keeps_its_rates_and_links_and_another_has_what_was_measured():
    def of(name):
        device = Device(type="cuda", name=name, count=2, memory_mib=81_559, capability=(9, 0), features=frozenset())
        tflops = {"fp32": 50.0, "bf16": 700.0}
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


def test_a_measurement_is_repeated_after_a_day(quick, tmp_path, monkeypatch):
    this_machine(tmp_path)
    later = measuring.time.time() + measuring.MAX_AGE_S + 1
    monkeypatch.setattr(measuring.time, "time", lambda: later)
    monkeypatch.setattr(measuring, "_seconds", lambda work: 1e-6)
    assert this_machine(tmp_path).memory_gb_per_s == round(2 * 1024**2 / 1e-6 / 1e9, 2)


def test_what_disturbs_some_calls_does_not_count():
    calls = iter([0.05, 0.05, *[0.01] * 1000])
    assert measuring._seconds(lambda: measuring.time.sleep(next(calls))) < 0.02
