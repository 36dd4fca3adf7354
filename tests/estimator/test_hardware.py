"""Hardware: devices known by name, and files with missing or impossible values."""

import math
import re

import pytest
import redline as rl
import yaml
from redline.base.errors import UsageError
from redline.estimator import Estimator, Hardware, Shape, find_hardware
from redline.estimator.hardware import DEVICES
from redline.estimator.kernels import products_of
from redline.estimator.request import estimate_request
from redline.estimator.trainers import find_trainer
from redline.tuner.setup import estimator_of

FULL = {
    "memory_gib": 40,
    "tflops": {"fp32": 20.0, "bf16": 300.0},
    "memory_gb_per_s": 1500,
    "intra_node": {"gb_per_s": 300, "latency_us": 6},
    "inter_node": {"gb_per_s": 25, "latency_us": 25},
    "devices_per_node": 8,
}


def written(tmp_path, data, name="mine.yaml"):
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_number_of_a_device_has_a_source(name):
    device = DEVICES[name]
    for each in ("memory_gib", "tflops", "memory_gb_per_s", "intra_node", "inter_node", "host_gb_per_s", "watts"):
        assert device.sources.get(each), f"{name}: {each}"


def test_a_device_with_less_power_sustains_less_and_one_with_power_to_spare_all():
    h100, h20, b200, gb300 = (find_hardware(each) for each in ("h100-80gb", "h20-96gb", "b200", "gb300"))
    usual = products_of(h100).sustained
    # A quarter of 700 W is for memory and leakage; voltage rises with the clocks.
    assert products_of(h100.replace(watts=500)).sustained == pytest.approx(usual * (325 / 525) ** 0.42)
    assert products_of(h100.replace(watts=None)).sustained == usual
    assert products_of(h20).sustained == 1.0  # a seventh of the rate, and more than half of the power
    assert products_of(b200).sustained < products_of(gb300).sustained < 1.0
    a100 = find_hardware("a100-80gb")
    assert products_of(a100.replace(watts=300)).sustained < products_of(a100).sustained


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h100", "h100-80gb"), ("H100-SXM", "h100-80gb"), ("H100_80GB", "h100-80gb"), ("h200", "h200-141gb"),
        ("rtx4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("4090", "rtx-4090"), ("A100 40G", "a100-40gb"),
        ("a100-80gb-sxm", "a100-80gb"), ("A100 80 GB", "a100-80gb"), ("B200 180GB", "b200"), ("T4 16G", "t4"),
        # Names as printed by nvidia-smi, rocm-smi and torch.cuda.get_device_name.
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA H200", "h200-141gb"), ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("A100-SXM4-80GB", "a100-80gb"), ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Tesla V100-SXM2-16GB", "v100-16gb"), ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"), ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)  # fmt: skip
def test_hardware_is_found_as_people_write_it_and_as_drivers_print_it(name, device):
    assert find_hardware(name) is DEVICES[device]


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("a100", "a100-80gb", "'a100' is taken for a100-80gb, the most common; there is a100-40gb too"),
        ("V100", "v100-32gb", "'V100' is taken for v100-32gb, the most common; there is v100-16gb too"),
        ("NVIDIA H100 PCIe", "h100-80gb", "numbers are the SXM module's"),
        ("NVIDIA H100 NVL", "h100-80gb", "numbers are the SXM module's"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", "numbers are the SXM module's"),
    ],
)
def test_an_ambiguous_device_name_is_resolved_with_a_note(name, device, message):
    found = find_hardware(name)
    assert message in found.note
    assert found.replace(note="") == DEVICES[device]


def test_the_estimate_and_the_search_pass_on_what_is_uncertain_about_the_hardware():
    workload, messages = rl.workload("gpt2-tiny"), []
    assert any("'a100' is taken for a100-80gb" in note for note in estimate_request(workload, "a100").notes)
    estimator_of(workload, rl.Space(), messages.append, devices=1, hardware="a100", memory_limit_mib=None)
    assert len(messages) == 1 and "'a100' is taken for a100-80gb" in messages[0]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090"),
        ("NVIDIA RTX 4060 Ti 16GB", "rtx-4090"),
        ("NVIDIA A16", "a10"),
        ("h100 96gb", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a10"),
    ],
)
def test_another_chip_or_a_part_of_one_is_not_taken_for_its_like(name, nearest):
    with pytest.raises(UsageError, match=f"unknown hardware '{name}'; did you mean '{nearest}"):
        find_hardware(name)


def test_an_unknown_name_asks_for_a_file_that_is_complete(tmp_path):
    with pytest.raises(UsageError) as caught:
        find_hardware("NVIDIA RTX 4060 Ti 16GB")
    text = str(caught.value)
    assert "--hardware nvidia-rtx-4060-ti-16gb.yaml" in text
    lines = ["memory_gib: 16", *re.findall(r"`(\w+: .*?)`", text)]
    made = find_hardware(written(tmp_path, "\n".join(lines), "nvidia-rtx-4060-ti-16gb.yaml"))
    assert made.memory_gib == 16 and made.tflops == {"fp32": 60, "bf16": 120} and made.unmeasured is not None


def test_a_device_without_measured_runs_says_so_and_has_wider_intervals():
    def spread(name):
        shape = {"layers": 16, "hidden": 2048, "heads": 16, "intermediate": 5632, "vocabulary": 32000}
        return Estimator(shape, name, {"devices": 8, "seq_len": 2048})({"micro_batch": 4})

    h100, h200, mi300x = (spread(each) for each in ("h100-80gb", "h200-141gb", "mi300x"))
    width = [math.log(each.step_ms_high / each.step_ms_low) for each in (h100, h200, mi300x)]
    assert width[0] < width[1] < width[2]
    assert find_hardware("h100-80gb").unmeasured is None
    assert "no training on mi300x was measured" in find_hardware("mi300x").unmeasured
    # A file that changes the rates describes another device; one that limits the power does not.
    rates = {"fp32": 60.0, "bf16": 900.0}
    card = Hardware.from_mapping({"base": "h100-80gb", "tflops": rates}, name="card", where="test")
    slow = Hardware.from_mapping({"base": "h100-80gb", "watts": 500}, name="slow", where="test")
    assert card.unmeasured is not None and slow.unmeasured is None


@pytest.mark.parametrize("name", ["", "gpu", "NVIDIA Graphics Device", "80GB", "pcie"])
def test_a_name_without_a_chip_is_no_hardware(name):
    with pytest.raises(UsageError, match="unknown hardware"):
        find_hardware(name)


def test_a_precision_that_a_device_lacks_runs_at_the_next_one():
    assert find_hardware("t4").rate("bf16") == find_hardware("t4").rate("fp32")
    assert find_hardware("a100-80gb").rate("fp8") == find_hardware("a100-80gb").rate("bf16")


def test_a_file_with_a_base_has_its_kernels_whatever_the_file_is_called(tmp_path):
    base = find_hardware("h100-80gb")
    ours = find_hardware(written(tmp_path, {"base": "h100-80gb"}, "ours.yaml"))
    newer = find_hardware(written(tmp_path, {"base": str(tmp_path / "ours.yaml")}, "newer.yaml"))
    shape = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256)
    setup = find_trainer("torchtitan").training(seq_len=8192, devices=8, attention="sdpa")
    config = {"dp": 8, "micro_batch": 1, "grad_accum": 4}
    steps = [
        Estimator(shape, machine, setup, framework="torchtitan")(config).step_ms for machine in (base, ours, newer)
    ]
    assert steps[1:] == [steps[0], steps[0]]


def test_a_base_fills_in_what_a_file_leaves_out(tmp_path):
    found = find_hardware(written(tmp_path, {"base": "h100-80gb", "devices_per_node": 4}))
    assert found.devices_per_node == 4
    assert found.tflops == DEVICES["h100-80gb"].tflops
    assert found.name == "mine"


@pytest.mark.parametrize("field", sorted(FULL))
def test_a_missing_field_is_named(tmp_path, field):
    data = {name: value for name, value in FULL.items() if name != field}
    with pytest.raises(UsageError, match=rf"mine\.yaml lacks {field}.*base:"):
        Hardware.from_yaml(written(tmp_path, data))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_gib", 0), ("memory_gib", -80), ("memory_gib", math.nan), ("memory_gib", math.inf),
        ("memory_gib", "80"), ("memory_gib", True), ("memory_gb_per_s", 0), ("memory_gb_per_s", None),
        ("devices_per_node", 0), ("devices_per_node", 2.5), ("devices_per_node", 8192),
        ("tflops", 312), ("tflops", {"bf16": 312}), ("tflops", {"fp32": -1}), ("tflops", {"fp32": math.nan}),
        ("tflops", {"fp32": 20, "bf61": 312}), ("intra_node", 300), ("intra_node", {"gb_per_s": 300}),
        ("inter_node", {"gb_per_s": 0, "latency_us": 5}), ("inter_node", {"gb_per_s": 25, "latency_us": -5}),
        ("inter_node", {"gb_per_s": 25, "latency_us": 5, "color": 1}), ("achievable", 1.5), ("achievable", 0),
        ("host_gb_per_s", -1), ("cores", "none"), ("inter_node", {"gb_per_s": math.nan, "latency_us": 5}),
    ],
)  # fmt: skip
def test_an_impossible_number_is_named_with_its_file(tmp_path, field, value):
    with pytest.raises(UsageError) as caught:
        Hardware.from_yaml(written(tmp_path, {**FULL, field: value}))
    assert "mine.yaml" in str(caught.value)
    assert field in str(caught.value) or (isinstance(value, dict) and any(key in str(caught.value) for key in value))


def test_an_unknown_field_names_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="memory_gib"):
        Hardware.from_yaml(written(tmp_path, {**FULL, "memory_gb": 40}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("", "must hold a mapping"),
        ("base: h1000\n", "h100"),
    ],
)
def test_an_invalid_file_is_an_error(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        Hardware.from_yaml(written(tmp_path, text))


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read"):
        find_hardware(tmp_path / "nowhere.yaml")


def test_more_ranks_than_a_cpu_has_memory_for_are_refused():
    cpu = DEVICES["v100-16gb"].replace(name="this-cpu", kind="cpu", cores=2, memory_gib=16.0, devices_per_node=1)
    assert cpu.shared(160).memory_gib == pytest.approx(0.1)
    with pytest.raises(UsageError) as refused:
        cpu.shared(4096)
    message = "4,096 ranks on one CPU would have 4 MiB of its 16,384 MiB each; at most 160 have room there: give fewer devices"
    assert str(refused.value) == message
