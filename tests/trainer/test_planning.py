"""A continued training keeps its computation, takes the fastest fitting configuration, and has safer fallbacks."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import redline as rl
import torch
from redline.base.device import detect
from redline.base.errors import NothingFound, SpaceError
from redline.estimator import Estimator, TrainingSetup, find_hardware
from redline.estimator.survey import device_of
from redline.space import Config
from redline.trainer.planning import CLEARLY_LESS, adapted, beginning_with, plan, safer, training_space, with_samples_of
from redline.trainer.request import TrainingSource, TrainRequest, winner
from redline.tuner.feasibility import HEADROOM
from tiers import tiered

CPU = detect()
H100, A100 = "h100-80gb", "a100-80gb"
LIKE = Config(
    tp=1, pp=1, zero=2, micro_batch=4, checkpoint_ratio=0.0, precision="bf16", fusion=False, dp=2, grad_accum=4
)
LIKE_16 = Config({**LIKE, "grad_accum": 2})


@pytest.fixture(scope="module")
def tiny():
    return rl.workload("gpt2-tiny", seq_len=64, global_batch=32)


@pytest.fixture(scope="module")
def large():
    return rl.workload("llama2-7b", seq_len=2048, global_batch=64)


def estimator(workload, devices, limit=None, hardware=H100):
    setup = TrainingSetup(
        devices=devices, seq_len=workload.seq_len, global_batch=workload.global_batch, memory_limit_mib=limit
    )
    return Estimator(workload, hardware, setup)


def samples(config):
    return config["micro_batch"] * config["grad_accum"] * config.get("dp", 1)


@pytest.mark.parametrize("devices", tiered([1, 4], [8]))
def test_on_other_devices_precision_and_samples_of_a_step_stay(tiny, devices):
    for precision in ("fp32", "bf16", "bf16_pure"):
        like = Config({**LIKE, "precision": precision, "grad_accum": 2})
        found = plan(tiny, devices=devices, like=like, hardware=H100)
        assert found.config["precision"] == precision
        assert samples(found.config) == samples(like) == 16, "not the workload's 32"
        assert math.prod(found.config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp")) == devices
        assert found.estimate.fits
        assert found.why.startswith("the estimate's best of") and f"{devices} x {H100}" in found.why


def test_a_winner_is_adapted_to_other_knobs_with_the_samples_of_its_step(tiny):
    winner = Config({**LIKE, "micro_batch": 6, "grad_accum": 2, "dp": 2})
    workload = with_samples_of(tiny, winner)
    found = adapted(workload, winner, CPU, devices=2, fixed={"micro_batch": 4}, of="it").config
    assert (found["micro_batch"], found["grad_accum"], found["dp"]) == (4, 3, 2)
    assert {name: found[name] for name in ("zero", "precision", "fusion")} == {
        name: winner[name] for name in ("zero", "precision", "fusion")
    }
    wide = adapted(workload, winner, CPU, devices=2, fixed={"tp": 2}, of="it").config
    assert (wide["tp"], wide["dp"], samples(wide)) == (2, 1, 24)
    more = adapted(tiny.with_global_batch(48), winner, CPU, devices=2, fixed={}, of="it").config
    assert (more["micro_batch"], samples(more)) == (6, 48), "a size that the default space lacks is kept"
    with pytest.raises(SpaceError, match="micro_batch"):
        adapted(workload, winner, CPU, devices=2, fixed={"micro_batch": 5}, of="it")


def test_a_format_that_a_winner_cannot_keep_here_is_reported(tiny):
    winner = Config({**LIKE, "precision": "fp8"})
    found = adapted(with_samples_of(tiny, winner), winner, CPU, devices=2, fixed={"micro_batch": 2}, of="it")
    assert found.config["precision"] != "fp8" and "; precision=fp8 could not be kept: " in found.why


def test_a_training_of_a_winner_has_the_requested_batch_and_knobs(tiny):
    source = TrainingSource(spec="gpt2-tiny", config=LIKE, devices=2, global_batch=32)

    def asked(**more):
        request = TrainRequest(source="x", **more)
        return winner(request, source, tiny.with_global_batch(request.global_batch or 32), CPU).config

    assert asked() == asked(fix={"micro_batch": 4}) == asked(global_batch=32) == LIKE
    assert samples(asked(global_batch=64)) == 64
    assert samples(asked(fix={"micro_batch": 2})) == 32 and asked(fix={"micro_batch": 2})["micro_batch"] == 2


def test_gradients_travel_as_before(tiny, large):
    half = plan(tiny, devices=4, like=Config({**LIKE, "reduce_dtype": "bf16"}), hardware=H100, fixed={"tp": 1, "pp": 1})
    assert half.config["reduce_dtype"] == "bf16"
    # Lossy values are in the space only because of the first configuration.
    eight = Config({**LIKE, "precision": "fp8"})
    found = plan(large, devices=4, like=eight, hardware=H100, fixed={"tp": 1, "pp": 1})
    assert (found.config["precision"], found.config["reduce_dtype"]) == ("fp8", "fp32")


def test_experts_keep_their_capacity_and_get_none():
    mixture = rl.workload("mixtral-tiny", seq_len=64, global_batch=32)
    for factor in (1.25, 0):
        found = plan(mixture, devices=2, like=Config({**LIKE, "capacity_factor": factor}), hardware=H100)
        assert found.config.get("capacity_factor", 0) == factor


def test_unsupported_formats_become_exact_ones_with_a_note(tiny):
    found = plan(tiny, devices=2, like=Config({**LIKE, "precision": "fp8"}), hardware=A100)
    assert found.config["precision"] in ("fp32", "tf32", "bf16")
    assert "precision=fp8 could not be kept: knob 'precision' has no value 'fp8'" in found.why


def test_no_other_configuration_that_leaves_the_headroom_has_more_hope(tiny):
    workload, asked = with_samples_of(tiny, LIKE), {"devices": 2, "like": LIKE, "hardware": H100}
    limit_mib = plan(tiny, **asked).estimate.peak_memory_mib / 0.97
    measure = estimator(workload, 2, limit_mib)
    found = plan(tiny, **asked, memory_limit_mib=limit_mib)
    space, _ = training_space(workload, device_of(find_hardware(H100)), 2, LIKE)
    table = measure.table(list(space))
    room = table.fullest_memory_mib <= (1 - HEADROOM) * measure.memory_limit_mib
    assert 0 < room.sum() < len(table)
    hope = table.throughput * table.probability_runs
    assert found.estimate.throughput * found.estimate.probability_runs == pytest.approx(hope[room].max())
    assert found.estimate.peak_memory_mib <= (1 - HEADROOM) * measure.memory_limit_mib


def test_a_model_that_does_not_fit_is_refused_with_the_least_that_it_needs(large):
    like = Config({**LIKE, "precision": "fp32", "dp": 1, "grad_accum": 16})
    asked = {"like": like, "fixed": {"offload": "none"}, "hardware": H100}
    with pytest.raises(NothingFound) as refused:
        plan(large, devices=1, **asked)
    message = str(refused.value)
    assert "configurations of llama2-7b is predicted to fit 1 x h100-80gb, with 79,798 MiB each." in message
    assert "`redline estimate` names changes" in message
    need = float(message.partition("The least that any needs is ")[2].split(" MiB")[0].replace(",", ""))
    assert plan(large, devices=1, memory_limit_mib=need + 1, **asked).estimate.fits
    with pytest.raises(NothingFound):
        plan(large, devices=1, memory_limit_mib=need - 1, **asked)


def test_a_global_batch_that_the_devices_cannot_share_and_a_knob_that_is_not_there_are_refused(tiny):
    with pytest.raises(SpaceError, match="knob 'tp' has no value 3; the nearest is 2"):
        plan(tiny, devices=2, hardware=H100, fixed={"tp": 3})
    with pytest.raises(SpaceError, match="the global batch must be a multiple .* but 16 is not one of 7; 14 is"):
        plan(tiny, devices=7, like=LIKE_16, hardware=H100)


def test_untraceable_models_train_in_the_default_configuration():
    def batch(size, seed):
        import torch

        return torch.zeros(size, 4), torch.zeros(size)

    class Fickle(__import__("torch").nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    own = rl.Workload(model=lambda: Fickle(4, 1), batch=batch, loss=lambda out, each: out.mean(), global_batch=8)
    found = plan(own, devices=1, hardware=H100, like=Config(precision="fp32"))
    assert found.estimate is None and found.config["micro_batch"] == 8
    assert found.why.startswith("the default configuration, since nothing can be predicted: ")


def test_a_search_begins_with_what_would_be_taken_without_it(tiny):
    space, _ = training_space(tiny, device_of(find_hardware(H100)), 2, LIKE)
    config = space.sample(1, seed=5)[0]
    assert space.default() != config
    assert beginning_with(space, config).default() == config
    assert space.default() != config, "the space itself is as it was"


def test_own_knobs_of_the_model_stay_when_a_training_is_planned_again():
    def model(config):
        return torch.nn.Sequential(torch.nn.Linear(8, config["width"]), torch.nn.Linear(config["width"], 1))

    space = rl.Space()
    micro = space.choice("micro_batch", [8, 16, 32, 64])
    space.choice("width", [512, 1024])
    space.derive("grad_accum", 64 // micro)
    workload = rl.Workload(
        model=model, space=space, name="wide", global_batch=64,
        batch=lambda size, seed: (torch.zeros(size, 8), torch.zeros(size, 1)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )  # fmt: skip
    like = Config(micro_batch=64, width=1024, grad_accum=1)
    free, _ = training_space(workload, device_of(find_hardware(H100)), 1)
    kept, _ = training_space(workload, device_of(find_hardware(H100)), 1, like)
    assert {config["width"] for config in free} == {512, 1024} and {config["width"] for config in kept} == {1024}
    fixed, _ = training_space(workload, device_of(find_hardware(H100)), 1, like, {"width": 512})
    assert {config["width"] for config in fixed} == {512}


def chain(workload, config, devices, **more):
    """All fallbacks from a configuration, one per failure."""
    failed, found = [config], []
    while (
        taken := safer(workload, failed[-1], devices=devices, failed=failed[:-1], hardware=H100, **more)
    ) is not None:
        assert taken.config not in failed
        failed.append(taken.config)
        found.append(taken)
    return found


@pytest.mark.parametrize(("name", "devices"), tiered([("tiny", 2)], [("large", 8)]))
def test_each_fallback_needs_clearly_less_than_all_that_failed_until_none_is_left(request, name, devices):
    workload = request.getfixturevalue(name)
    begin = plan(workload, devices=devices, like=LIKE, hardware=H100)
    fallbacks = chain(workload, begin.config, devices)
    assert 3 <= len(fallbacks) <= 40
    need = begin.estimate.peak_memory_mib
    for each in fallbacks:
        assert each.estimate.peak_memory_mib <= CLEARLY_LESS * need * 1.001
        assert each.config["precision"] == "bf16" and samples(each.config) == samples(LIKE)
        need = each.estimate.peak_memory_mib


def test_a_fallback_is_the_fastest_of_what_needs_clearly_less(tiny):
    begin = plan(tiny, devices=2, like=LIKE, hardware=H100)
    taken = safer(tiny, begin.config, devices=2, hardware=H100)
    workload = with_samples_of(tiny, LIKE)
    space, _ = training_space(workload, device_of(find_hardware(H100)), 2, LIKE)
    configs = list(space)
    table = estimator(workload, 2).table(configs)
    less = table.fullest_memory_mib <= CLEARLY_LESS * begin.estimate.peak_memory_mib
    assert taken.estimate.throughput == pytest.approx(table.throughput[less].max(), rel=2e-3)
    share = 100 * taken.estimate.throughput / begin.estimate.throughput
    assert f"MiB instead of {begin.estimate.peak_memory_mib:,.0f} MiB, at {share:.0f} % of its speed" in taken.why


PROGRAM = """
import sys
import redline as rl
from redline.estimator import measuring
from redline.space import Config
from redline.trainer.planning import safer

def measured(*args, **how):
    raise AssertionError("nothing is measured")

measuring.measure = measuring.this_machine = measured
workload = rl.workload("gpt2-tiny", seq_len=64, global_batch=32)
config = Config(tp=1, pp=1, zero=0, micro_batch=16, precision="fp32", fusion=False, dp=2, grad_accum=1)
taken = safer(workload, config, devices=2, memory_limit_mib=500.0)
print(dict(taken.config), taken.why)
"""


@pytest.mark.slow
def test_every_process_plans_the_same_fallback_without_measuring(capsys, monkeypatch):
    """A separate process, whose sets have another order, returns this process's fallbacks."""
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path.home(), timeout=300
    )
    monkeypatch.setattr("redline.estimator.measuring.measure", None)
    monkeypatch.setattr("redline.estimator.measuring.this_machine", None)
    exec(PROGRAM, {})
    assert other.stdout == capsys.readouterr().out and "'precision': 'fp32'" in other.stdout
