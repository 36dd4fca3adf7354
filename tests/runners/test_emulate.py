"""Trials with emulated ranks: some ranks of a job run alone on one device."""

import pytest
import redline as rl
from redline.base.device import detect
from redline.estimator.document import fullest_rank
from redline.estimator.hardware import find_hardware
from redline.results import Status
from redline.runners import TimingPlan, TrialTerms
from redline.runners.place.emulate import EmulateRunner, EmulationTerms, emulated_ranks
from redline.runners.runner import TrialRequest
from redline.space import Config
from redline.training.world import World

H100 = find_hardware("h100-80gb")
QUICK = TimingPlan(warmup_max_steps=2, min_steps=2, max_steps=2, seconds=0.1)
CASES = {
    "tensor parallel": ("llama-tiny", 2, {"tp": 2}),
    "ZeRO 3": ("gpt2-tiny", 2, {"zero": 3}),
    "interleaved": ("llama-tiny", 2, {"pp": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}),
    "experts": ("mixtral-tiny", 2, {"ep": 2}),
}
MORE = {
    "ZeRO 0": ("bert-tiny", 2, {"zero": 0}),
    "ZeRO 1": ("bert-tiny", 2, {"zero": 1}),
    "ZeRO 2": ("t5-tiny", 2, {"zero": 2}),
    "1F1B": ("t5-tiny", 2, {"pp": 2}),
    "GPipe": ("gpt2-tiny", 2, {"pp": 2, "pipeline_schedule": "gpipe"}),
    "zero bubble": ("llama-tiny", 2, {"pp": 2, "pipeline_schedule": "zero_bubble"}),
    "ZBV": ("llama-tiny", 2, {"pp": 2, "pipeline_schedule": "zbv", "virtual_stages": 2}),
    "heads": ("bert-tiny", 2, {"sp": 2}),
    "ring": ("llama-tiny", 2, {"cp": 2}),
    "tp and sequence": ("llama-tiny", 2, {"tp": 2, "sequence_parallel": True}),
    "tp and ZeRO 3": ("gpt2-tiny", 4, {"tp": 2, "zero": 3}),
    "pp and dp": ("llama-tiny", 4, {"pp": 2, "zero": 1}),
    "all": ("llama-tiny", 16, {"pp": 2, "tp": 2, "cp": 2, "zero": 1}),
    "compiled": ("llama-tiny", 2, {"tp": 2, "fusion": True}),
    "bf16": ("llama-tiny", 2, {"zero": 3, "precision": "bf16"}),
}


@pytest.fixture
def emulate(kept_agent):
    """Runs one trial and returns its measurement."""

    def run(model, devices, config, *, limit_mib=4000.0, hardware=H100, log=None, **how):
        workload = rl.workload(model, global_batch=max(16, 4 * devices))
        terms = TrialTerms(device=detect(), devices=devices, memory_limit_mib=limit_mib, threads=1, plan=QUICK)
        emulation = EmulationTerms(hardware=hardware, **how)
        runner = EmulateRunner(
            workload,
            terms,
            emulation,
            estimator=rl.Estimator(workload, hardware, {"devices": devices}),
            compiles=bool(config.get("fusion")),
            agent=kept_agent(),
        )
        return runner.run(TrialRequest(config=Config({"micro_batch": 4, **config}), number=0, log=log))

    return run


def check(measured, devices, config):
    assert measured.ok, measured.reason
    assert "not finite" not in measured.reason
    assert measured.step_ms > 0 and measured.throughput > 0
    assert 1e-3 * measured.step_ms_spread > 0
    # The slowest stage of a pipeline may never wait for another.
    assert measured.seconds_modelled > 0 or config.get("pp", 1) > 1
    assert 0 <= measured.seconds_modelled < 1e-3 * measured.step_ms
    pp = config.get("pp", 1)
    assert len({int(each) // (devices // pp) for each in measured.emulated_ranks.split(",")}) == pp, "every stage"


@pytest.mark.parametrize("name", CASES)
def test_ranks_run_alone_with_finite_values_and_their_communication_is_priced(emulate, name):
    model, devices, config = CASES[name]
    check(emulate(model, devices, config), devices, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_way_of_spreading_a_model_is_emulated(emulate, name):
    model, devices, config = MORE[name]
    check(emulate(model, devices, config), devices, config)


def test_memory_alone_is_measured_and_the_time_predicted(emulate):
    measured = emulate("gpt2-tiny", 64, {"zero": 1, "pp": 2}, memory_only=True)
    assert measured.ok, measured.reason
    assert measured.emulated_ranks == "0,32"
    assert measured.seconds_modelled == pytest.approx(1e-3 * measured.step_ms)
    assert 10 < measured.peak_memory_mib < 1000
    workload = rl.workload("gpt2-tiny", global_batch=256)
    estimate = rl.Estimator(workload, H100, {"devices": 64})(Config(micro_batch=4, zero=1, pp=2))
    assert measured.step_ms == pytest.approx(estimate.step_ms)
    # Conversion from an 80 % interval to a 95 % one.
    assert measured.step_ms_spread == pytest.approx(
        1.529 * (estimate.step_ms_high - estimate.step_ms_low) / 2, rel=1e-3
    )
    assert "memory measured, time predicted" in measured.reason


def test_degrees_that_do_not_make_the_world_are_refused_with_the_numbers(emulate):
    measured = emulate("gpt2-tiny", 8, {"tp": 3})
    assert measured.status is Status.CRASH
    assert "8" in measured.reason and "3" in measured.reason


def test_memory_with_fusion_is_measured_without_compiling_for_this_cpu(emulate):
    measured = emulate("gpt2-tiny", 4, {"fusion": True}, memory_only=True)
    plain = emulate("gpt2-tiny", 4, {}, memory_only=True)
    assert measured.ok, measured.reason
    assert measured.seconds_compile == 0
    assert "without fusion" in measured.reason and "without fusion" not in plain.reason
    # The peak is of resident pages: files mapped after it count out of it. Compiling adds almost half of the plain peak.
    assert measured.peak_memory_mib == pytest.approx(plain.peak_memory_mib, rel=0.25)
    assert measured.step_ms < plain.step_ms, "the estimate knows that it is fused"


def test_deciding_ranks_are_one_of_each_stage_and_for_memory_the_ends_and_the_fullest():
    config = {"pp": 8, "tp": 2}
    world = World.of(config, 0, 32)
    assert emulated_ranks(world, config) == list(range(0, 32, 4))
    assert emulated_ranks(world, config, memory_only=True, fullest=3) == [0, 12, 28]
    assert emulated_ranks(world, config, memory_only=True, fullest=7) == [0, 28]


def test_memory_is_measured_on_the_rank_that_the_estimate_finds_the_fullest(emulate):
    config = {"pp": 4, "micro_batch": 1, "pipeline_schedule": "1f1b"}
    estimator = rl.Estimator(rl.workload("llama-tiny", global_batch=16), H100, {"devices": 4})
    place = fullest_rank(estimator, Config(config)).rank
    measured = emulate("llama-tiny", 4, config, memory_only=True)
    assert measured.emulated_ranks == ",".join(str(each) for each in sorted({0, place, 3}))


def test_ranks_that_share_experts_are_all_emulated_up_to_four():
    config = {"ep": 8}
    assert emulated_ranks(World.of(config, 0, 8), config) == [0, 1, 2, 3]
    config = {"tp": 2, "ep": 2}
    assert emulated_ranks(World.of(config, 0, 8), config) == [0, 2]
    # Ranks that share layers, which are neighbours, hold whole experts.
    config = {"tp": 2, "ep": 2, "etp": 1}
    assert emulated_ranks(World.of(config, 0, 8), config) == [0, 1]
