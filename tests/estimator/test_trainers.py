"""Facts of other trainers change memory and time as expected; an unknown trainer is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from redline.base.errors import UsageError
from redline.estimator import Constants, Estimator, Shape, TrainingSetup, find_hardware
from redline.estimator.facts.model_facts import ModelFacts
from redline.estimator.kernels import attention_share, kernel_of, product_seconds, products_of
from redline.estimator.trainers import TRAINERS, built, find_trainer, trainer_of
from redline.models import workload as preset
from redline.models.architecture import shape_of
from shape_requests import shape_request

SHAPE = {"layers": 16, "hidden": 2048, "heads": 16, "intermediate": 5632, "vocabulary": 32000}
CONFIG = {"dp": 8, "zero": 3, "micro_batch": 4, "grad_accum": 4}


def memory(config=CONFIG, framework="fsdp", **asked):
    setup = find_trainer(framework).training(seq_len=2048, **asked)
    return Estimator(SHAPE, "a100-80gb", setup, framework=framework)(config)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_every_trainer_gives_a_setup_that_can_be_estimated(name):
    assert memory(framework=name).step_ms > 0


def test_an_unknown_trainer_is_refused_and_what_is_built_upon_one_has_its_facts():
    with pytest.raises(UsageError, match="unknown framework 'megatorn'; did you mean 'megatron'"):
        find_trainer("megatorn")
    assert trainer_of("megatron-bridge").name == "megatron" and trainer_of("axolotl").name == "trainer"


def test_losses_that_keep_less_of_the_logits_need_less():
    peaks = [memory(loss=each).peak_memory_mib for each in ("plain", "parallel", "compiled", "fused", "chunked")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 5


def test_keeping_every_other_product_lies_between_keeping_all_and_recomputing_blocks():
    some, all_kept, none = memory(keeps_products=True), memory(), memory({**CONFIG, "checkpoint_ratio": 1.0})
    assert none.peak_memory_mib < some.peak_memory_mib < all_kept.peak_memory_mib
    assert all_kept.step_ms < some.step_ms < none.step_ms


def test_gradients_that_stay_whole_while_they_accumulate_cost_memory_and_save_reductions():
    whole, cut = memory(unsharded_gradients=True), memory()
    gradients = [each.breakdown["memory.gradients"] for each in (whole, cut)]
    assert gradients[0] == pytest.approx(8 * gradients[1])
    assert whole.breakdown["time.data parallel"] < cut.breakdown["time.data parallel"]
    once = {**CONFIG, "grad_accum": 1}
    assert memory(once, unsharded_gradients=True).peak_memory_mib == memory(once).peak_memory_mib


def test_frozen_weights_have_neither_gradients_nor_states():
    facts = ModelFacts.from_shape(precision="bf16_pure", **SHAPE)
    frozen = replace(facts, shape=None, parts=tuple(replace(each, frozen=each.parameters) for each in facts.parts))
    setup = TrainingSetup(seq_len=2048, precision="bf16_pure")
    terms = Estimator(frozen, "a100-80gb", setup)({"micro_batch": 1, "grad_accum": 2}).breakdown
    assert terms["memory.gradients"] == terms["memory.optimizer"] == 0
    weights = terms["memory.parameters"]
    narrow = Estimator(frozen, "a100-80gb", setup.replace(frozen_bits=4))({"micro_batch": 1, "grad_accum": 2})
    assert narrow.breakdown["memory.parameters"] == pytest.approx(weights / 4)


def test_attention_and_head_stay_in_16_bits_where_products_are_in_8():
    half, eight = (
        Estimator(
            SHAPE,
            "h100-80gb",
            find_trainer("megatron").training(seq_len=2048, products=each),
            constants=Constants(limited_rate=1.0),
        )({"micro_batch": 4})
        for each in (None, "fp8")
    )
    assert eight.breakdown["time.attention"] == half.breakdown["time.attention"]
    assert 0.5 < eight.breakdown["time.matmul"] / half.breakdown["time.matmul"] < 0.8
    assert eight.breakdown["time.memory-bound"] > half.breakdown["time.memory-bound"]  # casts take time


def test_a_product_takes_another_wave_where_it_has_one_tile_too_many():
    like = products_of(find_hardware("h100-80gb"))

    def seconds(rows):
        return float(
            product_seconds(np.array(rows), 256.0, 8192.0, width=2, peak=989e12, bandwidth=1e18, like=like, share=1.0)
        )

    waves = 128 * like.units  # rows of one wave of tiles of 128 x 256
    # Smaller tiles fill part of the additional wave.
    assert 1.1 < seconds(waves + 1) / seconds(waves) <= 2 and seconds(waves) == pytest.approx(
        seconds(waves - 64), rel=0.01
    )


def test_attention_reaches_less_at_short_sequences_and_by_older_kernels():
    h100 = find_hardware("h100-80gb")
    shares = [attention_share(h100, "flash2", keys, 128) for keys in (512, 4096, 65536)]
    assert shares == sorted(shares)
    assert attention_share(h100, "flash1", 4096, 128) < shares[1] < attention_share(h100, "flash3", 4096, 128)
    assert [kernel_of(each) for each in ("sdpa", "flash_attention_2", "flash_attention_3")] == [
        "flash3", "flash2", "flash3"
    ]  # fmt: skip


def test_gradients_that_stay_are_there_beside_the_activations_of_a_single_micro_batch():
    once = {**CONFIG, "zero": 0, "grad_accum": 1, "micro_batch": 16}
    come, stay = (memory(once, "redline", precision="bf16", gradients_stay=each) for each in (False, True))
    whole = 4 * ModelFacts.from_shape(**SHAPE).parameters / 2**20
    assert stay.breakdown["memory.gradients"] == pytest.approx(whole)
    assert come.breakdown["memory.gradients"] < whole / 5
    twice = {**once, "grad_accum": 2}
    assert memory(twice, "redline", precision="bf16", gradients_stay=True).peak_memory_mib == pytest.approx(
        memory(twice, "redline", precision="bf16").peak_memory_mib
    )


def test_fsdp_offloads_shards_of_weights_and_gradients_too():
    away = {**CONFIG, "offload": "optimizer"}
    states, pieces = (memory(away, offload_weights=each) for each in (False, True))
    assert states.breakdown["memory.optimizer"] == pieces.breakdown["memory.optimizer"] == 0
    assert states.breakdown["memory.parameters"] > 0
    assert pieces.breakdown["memory.parameters"] == pieces.breakdown["memory.gradients"] == 0
    assert pieces.breakdown["time.offload"] > states.breakdown["time.offload"] > 0
    # Whole weights stay on the device.
    whole = {**away, "zero": 1}
    assert memory(whole, offload_weights=True).breakdown["memory.parameters"] > 0


def test_plans_of_a_trainer_have_its_facts_regardless_of_knobs():
    shape = Shape(name="small", vocabulary=32000, layers=16, hidden=2048, heads=16)
    asked = {"devices": 8, "seq_len": 2048, "global_batch": 64}
    request = shape_request(shape, "a100-80gb", framework="megatron", **asked)
    knob = request.space["precision"]
    assert knob.values == ("bf16",) and request.framework.facts
    config = {"tp": 2, "micro_batch": 2, "zero": 1}
    wanted = Estimator(shape, "a100-80gb", find_trainer("megatron").training(**asked), framework="megatron")(config)
    for precision in ("bf16", "fp32"):
        found = request.estimator({**config, "precision": precision})
        assert found.step_ms == wanted.step_ms and found.peak_memory_mib == wanted.peak_memory_mib
    own = shape_request(shape, "a100-80gb", **asked)
    assert "fp32" in own.space["precision"].others
    assert (
        own.estimator({**config, "precision": "fp32"}).step_ms != own.estimator({**config, "precision": "bf16"}).step_ms
    )
    assert shape_request(shape, "v100-32gb", framework="megatron", **asked).estimator.training.products == "fp16"
    with pytest.raises(UsageError, match="unknown framework 'megatorn'"):
        shape_request(shape, "a100-80gb", framework="megatorn", **asked)


def test_a_trainer_that_builds_models_by_itself_has_no_modules_of_transformers():
    llama = {"family": "llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "intermediate": 512,
             "vocabulary": 1000, "positions": 2048, "tied": False}  # fmt: skip
    made = built(llama, find_trainer("megatron"))
    assert (made.kv_heads, made.gated, made.positions, made.biases) == (2, True, 0, False)
    gpt = built({**llama, "family": "gpt2", "dropout": 0.1, "tied": True}, find_trainer("nanotron"))
    assert (gpt.gated, gpt.positions, gpt.biases, gpt.dropout, gpt.tied) == (False, 2048, True, True, True)
    assert built(llama, find_trainer("fsdp")) is None and built(None, find_trainer("megatron")) is None
    mixture = built({**llama, "family": "mixtral", "experts": 8, "experts_per_token": 2}, find_trainer("megatron"))
    assert (mixture.experts, mixture.experts_per_token) == (8, 2)
    assert built({**llama, "family": "gpt_oss", "experts": 8}, find_trainer("megatron")) is None
    latent = preset("deepseek-v3")
    made = built(shape_of(latent.model), find_trainer("megatron"))
    assert made.facts(precision="bf16", attention="sdpa", fusion=True).parameters == 671_026_404_352
    assert (made.head_dim, made.rope_head_dim, made.v_head_dim, made.dense_layers) == (128, 64, 128, 3)


# Qwen3-235B's block, 8 layers of it.
MIXTURE = {"layers": 8, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_dim": 128, "intermediate": 12288, "vocabulary": 151936,
           "experts": 128, "experts_per_token": 8, "expert_intermediate": 1536}  # fmt: skip
SPREAD = {"ep": 32, "dp": 64, "micro_batch": 1, "grad_accum": 8, "zero": 1, "checkpoint_ratio": 1.0}


def recipe(hardware="gb200", framework="megatron-bridge", **facts):
    trainer = find_trainer(framework).assuming(facts)
    setup = trainer.training(seq_len=4096, devices=64)
    return Estimator(MIXTURE, hardware, setup, framework=trainer.name)(SPREAD)


def test_a_version_has_the_facts_of_its_time():
    latest, before, first = (recipe(framework=f"megatron-bridge{at}") for at in ("", "@25.11", "@25.04"))
    assert latest.step_ms < before.step_ms < first.step_ms
    assert find_trainer("megatron-bridge@26.02").setup == find_trainer("megatron-bridge").setup
    assert find_trainer("megatron-bridge@25.04").setup["early_kernels"] is True
    with pytest.raises(UsageError, match="a version has numbers, such as 25.11; facts change with 26.00, 25.11"):
        find_trainer("megatron-bridge@new")
    with pytest.raises(UsageError, match="facts change with none"):
        find_trainer("nanotron@1.0")


def test_an_unknown_fact_and_an_impossible_value_are_refused():
    megatron = find_trainer("megatron")
    for facts, message in (
        ({"overlap_expert": True}, "unknown fact 'overlap_expert'; did you mean 'overlap_experts'"),
        ({"tp": 2}, "unknown fact 'tp'"),
        ({"retries": 1}, "--assume retries: must be true or false, but got 1"),
        ({"loss": "fast"}, "unknown loss 'fast'"),
    ):
        with pytest.raises(UsageError, match=message):
            megatron.assuming(facts)


def test_early_kernels_are_assumed_only_where_software_can_be_that_old():
    def matmul(hardware, **facts):
        return recipe(hardware, "megatron", **facts).breakdown["time.matmul"]

    assert matmul("b200") == matmul("b200", early_kernels=True) > matmul("b200", early_kernels=False)
    assert matmul("b200", products="mxfp8") == matmul("b200", products="mxfp8", early_kernels=False)
    assert matmul("gb300") == matmul("gb300", early_kernels=False)
    assert matmul("h100-80gb", early_kernels=True) == matmul("h100-80gb", early_kernels=False)


def test_short_sequences_of_deepspeed_take_the_time_of_its_hooks():
    # Full fine-tuning of Qwen-7B on two A100-80GB, ZeRO 3, 8 micro-batches of 256 tokens, all blocks recomputed: 4.0 s a step
    # (README of github.com/QwenLM/Qwen); without hooks 2.3 s.
    qwen = Shape(layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=151936)
    config = {"dp": 2, "zero": 3, "micro_batch": 1, "grad_accum": 8, "checkpoint_ratio": 1.0}

    def step(seq_len, **constants):
        trainer = find_trainer("deepspeed")
        made = trainer.constants_on(Constants()).replace(**constants)
        setup = trainer.training(seq_len=seq_len, devices=2)
        return Estimator(qwen, "a100-80gb", setup, framework="deepspeed", constants=made)(config)

    assert step(256).step_ms == pytest.approx(4000, rel=0.25)
    assert step(256, gather_us=0.0, launch_us=9.0).step_ms < 0.5 * 4000
    assert step(4096).step_ms == pytest.approx(step(4096, gather_us=0.0).step_ms, rel=0.01)
    # On a host that is close to holding the device up, the interval knows that it may.
    width = [math.log(made.step_ms_high / made.step_ms_low) for made in (step(1024), step(16384))]
    assert width[0] > width[1]
