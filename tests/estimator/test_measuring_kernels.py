"""Curves of products and attention fitted to measured times."""

import numpy as np
import pytest
import redline as rl
import torch
from redline.base.device import Device
from redline.estimator import find_hardware, measuring
from redline.estimator.kernels import attention_share, kernel_of, product_seconds, products_of
from redline.estimator.measuring import Measured, keep, this_machine
from redline.estimator.measuring_kernels import (
    HEAD_DIM,
    HEADS,
    PRODUCT_SIZES,
    Kernels,
    attention_of,
    attention_s,
    fit_products,
    product_s,
    sustained_share,
    to_mapping,
)

CPU = torch.device("cpu")


def times(like, hardware):
    m, n, k = (np.array(each, float) for each in zip(*PRODUCT_SIZES, strict=True))
    rate, bandwidth = hardware.rate("bf16"), hardware.memory_gb_per_s * 1e9
    return product_seconds(m, n, k, width=2, peak=rate, bandwidth=bandwidth, like=like, share=1.0)


def fitted(seconds, hardware, units):
    return fit_products(
        PRODUCT_SIZES, seconds, peak=hardware.rate("bf16"), bandwidth=hardware.memory_gb_per_s * 1e9, units=units
    )


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "b200"])
def test_the_parameters_of_a_device_are_found_from_its_times(name):
    hardware = find_hardware(name)
    like = products_of(hardware)
    found, error = fitted(times(like, hardware), hardware, like.units)
    assert error < 1e-6
    for each in ("rate", "lost", "fixed_us", "bandwidth", "small"):
        assert getattr(found, each) == pytest.approx(getattr(like, each), rel=1e-3), each


def test_scattered_times_leave_a_curve_as_good_as_their_scatter():
    hardware = find_hardware("h100-80gb")
    like = products_of(hardware)
    exact = times(like, hardware)
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=len(exact)))
    found, error = fitted(exact * noise, hardware, like.units)
    assert 0.02 < error < 0.05
    assert np.median(np.abs(times(found, hardware) / exact - 1)) < 0.02


def test_attention_has_the_share_that_explains_its_times():
    peak = 1e15
    seconds = {
        length: 7 * HEADS * HEAD_DIM * length**2 / (peak * 0.5 * length / (length + 450)) for length in (1024, 16384)
    }
    assert attention_of(seconds, peak) == pytest.approx(0.5)
    assert attention_of({**seconds, 2048: None}, peak) is None


def test_kernels_are_timed():
    small, large = product_s((32, 32, 32), torch.float32, CPU), product_s((512, 512, 512), torch.float32, CPU)
    assert 0 < small < large
    assert 0 < sustained_share((256, 256, 256), torch.float32, CPU, seconds=0.05) <= 1
    assert attention_s(64, torch.float32, CPU) > 0


def test_attention_without_a_fused_kernel_has_no_time(monkeypatch):
    def refuse(message):
        def attention(*_, **__):
            raise RuntimeError(message)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)

    refuse("No available kernel. Aborting execution.")
    assert attention_s(64, torch.float32, CPU) is None
    refuse("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        attention_s(64, torch.float32, CPU)


def measured(name, capability):
    device = Device(
        type="cuda", name=name, count=2, memory_mib=81_000, capability=capability, features=frozenset({"bf16"})
    )
    like = products_of(find_hardware("a100-80gb"))
    return Measured(
        device=device,
        tflops={"fp32": {1024: 50.0}, "bf16": {1024: 700.0}, "fp16": {1024: 700.0}},
        memory_gb_per_s=2900.0,
        host_gb_per_s=40.0,
        kernels=Kernels(products=like, error=0.04, attention=0.4),
    )


def test_a_known_gpu_keeps_its_datasheet_and_gets_measured_curves(tmp_path, monkeypatch):
    found = measured("NVIDIA H100 80GB HBM3", (9, 0))
    h100 = find_hardware("h100-80gb")
    made = found.to_hardware()
    assert (made.name, made.tflops, made.memory_gb_per_s) == (h100.name, h100.tflops, h100.memory_gb_per_s)
    assert (made.host_gb_per_s, made.devices_per_node) == (40.0, 2)
    assert to_mapping(products_of(made)) == to_mapping(found.kernels.products)
    assert attention_share(made, kernel_of("sdpa"), 1e9, 128) == pytest.approx(0.4, rel=1e-3)
    usual = attention_share(h100, "flash2", 4096, 128) / attention_share(h100, "flash3", 4096, 128)
    assert attention_share(made, "flash2", 1e9, 128) == pytest.approx(0.4 * usual, rel=1e-3)
    assert "median error 4.0 %" in made.sources["products"]
    path = tmp_path / "machine.yaml"
    made.to_yaml(path)
    assert find_hardware(path) == made

    monkeypatch.setattr(measuring, "detect", lambda: found.device)
    assert this_machine(tmp_path).products is None
    keep(found, tmp_path)
    assert this_machine(tmp_path) == made


def test_an_unknown_gpu_has_its_measured_rates():
    made = measured("NVIDIA Unheard-of", (9, 0)).to_hardware()
    assert (made.tflops["bf16"], made.memory_gb_per_s, made.achievable) == (700.0, 2900.0, 1.0)
    assert products_of(made).units == 108


def test_impossible_curves_in_a_file_are_refused():
    h100 = find_hardware("h100-80gb")
    curves = to_mapping(products_of(h100))
    for changes, message in (
        ({"products": {**curves, "rate": 1.5}}, r"products.rate must be a number from 0.01 to 1, but got 1.5"),
        ({"products": {"rate": 0.5}}, "products must map rate, lost"),
        ({"attention": 0}, "attention must be a number from 0.001 to 1, but got 0"),
    ):
        with pytest.raises(rl.UsageError, match=message):
            h100.replace(**changes)
