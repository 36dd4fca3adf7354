"""The predicted cost of an optimizer in host memory, and plans that need it."""

import numpy as np
import pytest
from redline.estimator import Estimator, Shape
from redline.estimator.hardware import find_hardware
from redline.estimator.plans import choose, fastest
from redline.estimator.request import estimate_request
from redline.estimator.trainers import find_trainer
from redline.space import Config

LLAMA_7B = Shape(name="7B", layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000)


@pytest.mark.parametrize(
    ("zero", "micro_batch", "samples_per_second", "offloaded_samples_per_second"),
    [(2, 1, 4.19, 1.81), (3, 2, 4.45, 2.05)],
)
def test_deepspeed_s_offload_costs_what_is_published(
    zero, micro_batch, samples_per_second, offloaded_samples_per_second
):
    """LLaMA-7B on 8 x A800 with DeepSpeed 0.14.2, 64 sequences of 4,096 tokens a step, blocks recomputed:
    gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a. An A800 is an A100 with slower NVLink.
    """
    trainer = find_trainer("deepspeed")
    hardware = find_hardware("a100-80gb")
    setup = trainer.planned(hardware, devices=8, seq_len=4096, global_batch=64)
    estimator = Estimator(LLAMA_7B, hardware, setup, framework="deepspeed")
    config = {"zero": zero, "micro_batch": micro_batch, "checkpoint_ratio": 1, "attention": "sdpa"}
    here, there = (estimator({**config, "offload": name}).throughput for name in ("none", "optimizer"))
    assert here / there == pytest.approx(samples_per_second / offloaded_samples_per_second, rel=0.15)


def test_redline_s_own_offload_costs_what_was_measured():
    """bench/results/gpu-h200.md: gpt2-large in fp32, 8 sequences of 512 tokens."""
    request = estimate_request("gpt2-large", "h200", devices=1, seq_len=512, global_batch=8)
    config = {"micro_batch": 8, "precision": "fp32", "attention": "sdpa", "grad_accum": 1}
    here, there = (request.estimator(Config({**config, "offload": name})).step_ms for name in ("none", "optimizer"))
    assert there / here == pytest.approx(894.4 / 493.9, rel=0.15)
    assert there - here == pytest.approx(894.4 - 493.9, rel=0.1)


def test_ranks_of_a_node_share_the_host_s_rate():
    def offload(devices, **config):
        setup = find_trainer("redline").planned(find_hardware("h100"), devices=devices, seq_len=1024)
        estimator = Estimator(LLAMA_7B, "h100", setup)
        return estimator({"micro_batch": 1, "precision": "bf16", "offload": "optimizer", **config}).breakdown[
            "time.offload"
        ]

    one, node, two_nodes = offload(1), offload(8, zero=3), offload(16, zero=3)
    assert one > node > 0.7 * one, "a node updates all pieces together, and each device has a link"
    assert two_nodes == pytest.approx(node / 2, rel=0.01)
    assert offload(8, tp=8) == pytest.approx(offload(8, sp=8, zero=3), rel=0.1)


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_no_plan_has_a_setting_that_buys_nothing(hardware):
    request = estimate_request("llama3.2-1b", hardware, devices=1, seq_len=131_072)
    survey, plans = choose(request.estimator, request.space)
    least_memory = next((plan.ranked for plan in plans if plan.role == "least memory"), survey.best[0])
    for plan, most_memory in (
        (survey.best[0], np.inf), (fastest(request.estimator, request.space), np.inf), (least_memory, 1.01)
    ):  # fmt: skip
        for changes in ({"offload": "none", "fused_optimizer": True}, {"checkpoint_ratio": 0.0}):
            if changes.items() <= plan.config.to_dict().items():
                continue
            other = request.estimator(Config({**plan.config, **changes}))
            assert (
                other.throughput < 0.99 * plan.estimate.throughput
                or other.probability_fits < plan.estimate.probability_fits - 0.01
                or other.peak_memory_mib > most_memory * plan.estimate.peak_memory_mib
            ), plan.config
    assert survey.best[0].config["offload"] == "none"


def test_offloaded_activations_leave_the_device_and_take_the_time_of_the_host_s_link():
    def predicted(micro_batch=4, host_gb_per_s=50.0, **facts):
        setup = find_trainer("torchtitan").training(seq_len=4096, devices=8, **facts)
        hardware = find_hardware("h100").replace(host_gb_per_s=host_gb_per_s)
        return Estimator(LLAMA_7B, hardware, setup, framework="torchtitan")({"zero": 3, "micro_batch": micro_batch})

    here, there = predicted(), predicted(offload_activations=True)
    kept = here.breakdown["memory.activations"]
    # Two blocks of 32 stay.
    assert there.breakdown["memory.activations"] == pytest.approx(kept / 16, rel=0.1)
    assert here.breakdown["time.offload"] == 0 < there.breakdown["time.offload"]
    # Both ways, of which a fifth at least is not hidden; over a link that is slower than the passes, what they do not hide.
    moved_ms = kept * 2**20 / 50e9 * 1e3
    assert there.breakdown["time.offload"] >= 0.99 * 2 * 0.2 * moved_ms
    slow = predicted(host_gb_per_s=5.0, offload_activations=True).breakdown["time.offload"]
    assert slow > 2 * 10 * moved_ms - 0.81 * here.step_ms
    pageable = predicted(offload_activations=True, pinned_memory=False).breakdown["time.offload"]
    assert pageable > there.breakdown["time.offload"] / 0.5
