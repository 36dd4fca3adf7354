"""Frozen weights beside adapters: stored in the format of products or quantized, in estimates and in trials."""

import pytest
import torch
from redline.base.errors import WorkloadError
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.request import estimate_request
from redline.models import workload
from redline.models.lora import Lora, with_lora
from redline.training import Training
from small_models import small  # noqa: F401

pytest.importorskip("peft")
GIB = 1024.0
ONE = {"micro_batch": 1, "grad_accum": 1}


@pytest.fixture(scope="module")
def large():
    return workload("llama2-7b", seq_len=2048, global_batch=1)


def test_a_7b_with_adapters_fits_a_card_of_24_gib(large):
    """torchtune's recipe of one device trains it in 15 to 17 GB at this length."""
    config = {**ONE, "precision": "bf16", "checkpoint_ratio": 1.0}
    made = estimate_request(with_lora(large, Lora(r=16)), "rtx-4090", devices=1)
    estimate = made.estimator(config)
    assert 14 * GIB < estimate.peak_memory_mib < 19 * GIB
    assert estimate.fits


def test_frozen_weights_have_the_bits_of_their_format(large):
    def stored(lora, precision):
        found = Estimator(with_lora(large, lora), "a100-80gb", TrainingSetup(precision=precision))
        return found({**ONE, "precision": precision}).breakdown["memory.parameters"]

    weights = 6.738e9 / 2**20
    assert stored(Lora(r=8), "bf16") == pytest.approx(2 * weights, rel=0.02)
    assert stored(Lora(r=8), "fp16") == pytest.approx(2 * weights, rel=0.02)
    assert stored(Lora(r=8), "fp32") == pytest.approx(4 * weights, rel=0.02)
    assert stored(Lora(r=8, quantize="4bit"), "bf16") == pytest.approx(4.5 / 8 * weights, rel=0.02)


def test_quantized_weights_are_quantized_as_they_are_loaded():
    """Published for a 70B model on one GPU of 80 GB: 61 to 76 GB. Building it must not need all of its 16-bit weights at once."""
    made = with_lora(workload("llama3-70b", seq_len=1024, global_batch=1), Lora(r=8, quantize="4bit"))
    estimate = Estimator(made, "a100-80gb", TrainingSetup(precision="bf16"))({**ONE, "checkpoint_ratio": 1.0})
    assert estimate.breakdown["memory.build"] < 6 * GIB
    assert estimate.fits and 38 * GIB < estimate.peak_memory_mib < 76 * GIB


def test_trials_store_frozen_weights_in_the_format_of_products(small):  # noqa: F811
    def formats(**config):
        training = Training(with_lora(small("llama"), Lora(r=4)), {"micro_batch": 4, **config}, torch.device("cpu"))
        assert torch.isfinite(training.step())
        kinds = {True: set(), False: set()}
        for param in training.model.parameters():
            kinds[param.requires_grad].add(param.dtype)
        return kinds

    assert formats(precision="bf16") == {True: {torch.float32}, False: {torch.bfloat16}}
    assert formats(precision="fp32") == {True: {torch.float32}, False: {torch.float32}}


def test_a_trial_of_quantized_weights_is_refused(small):  # noqa: F811
    adapted = with_lora(small("llama"), Lora.parse("r=4,quantize=4bit"))
    assert str(adapted.model.lora) == "r=4,quantize=4bit"
    with pytest.raises(WorkloadError, match="redline estimate"):
        Training(adapted, {"micro_batch": 4}, torch.device("cpu"))
    with pytest.raises(WorkloadError, match="unknown quantize '3bit'"):
        Lora.parse("r=4,quantize=3bit")
