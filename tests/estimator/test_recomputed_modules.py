"""Recomputed modules of Megatron-LM take less memory and more time; unknown ones are refused."""

from dataclasses import replace

import pytest
from redline.base.errors import UsageError
from redline.estimator import Estimator, Shape
from redline.estimator.facts.derived import MODULES, modules_of, with_modules
from redline.estimator.trainers import find_trainer

# Qwen3-235B and DeepSeek-V3, from their config.json.
QWEN = Shape(layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, intermediate=12288, vocabulary=151936, experts=128,
             experts_per_token=8, expert_intermediate=1536)  # fmt: skip
DEEPSEEK = Shape(layers=61, hidden=7168, heads=128, intermediate=18432, vocabulary=129280, dense_layers=3, experts=256,
                 experts_per_token=8, expert_intermediate=2048, shared_intermediate=2048, head_dim=128, rope_head_dim=64,
                 v_head_dim=128, kv_lora_rank=512, q_lora_rank=1536)  # fmt: skip
DENSE = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256)
CONFIGS = {
    QWEN: {"tp": 2, "pp": 8, "ep": 8, "dp": 16, "etp": 1, "grad_accum": 64, "sequence_parallel": True, "zero": 1},
    DEEPSEEK: {"tp": 2, "pp": 8, "ep": 32, "dp": 16, "etp": 1, "grad_accum": 64, "sequence_parallel": True, "zero": 1},
    DENSE: {"tp": 2, "pp": 2, "dp": 64, "grad_accum": 8, "sequence_parallel": True, "zero": 1},
}


def predicted(shape, modules=None, **knobs):
    setup = find_trainer("megatron").training(seq_len=4096, devices=256, loss="fused", recompute_modules=modules)
    return Estimator(shape, "h800-80gb", setup, framework="megatron")({**CONFIGS[shape], **knobs})


@pytest.mark.parametrize(
    ("shape", "module"),
    [(QWEN, "moe_act"), (QWEN, "layernorm"), (QWEN, "moe"), (DEEPSEEK, "mla_up_proj"), (DEEPSEEK, "shared_experts"),
     (DENSE, "mlp"), (DENSE, "layernorm")],
)  # fmt: skip
def test_each_module_takes_memory_less_and_time_more_than_none_and_less_than_whole_blocks(shape, module):
    none, some, whole = predicted(shape), predicted(shape, module), predicted(shape, checkpoint_ratio=1.0)
    assert whole.peak_memory_mib < some.peak_memory_mib < 0.995 * none.peak_memory_mib
    assert none.step_ms < some.step_ms < whole.step_ms


@pytest.mark.parametrize(
    ("shape", "module"), [(QWEN, "mlp"), (QWEN, "mla_up_proj"), (DENSE, "moe"), (DENSE, "moe_act")]
)
def test_a_module_that_a_model_lacks_changes_nothing(shape, module):
    none, some = predicted(shape), predicted(shape, module)
    assert some.peak_memory_mib == none.peak_memory_mib and some.step_ms == none.step_ms


def test_modules_add_up_and_blocks_that_are_recomputed_as_a_whole_repeat_nothing_twice():
    both, one = predicted(QWEN, "moe_act+layernorm"), predicted(QWEN, "moe_act")
    assert both.peak_memory_mib < one.peak_memory_mib
    whole = predicted(QWEN, checkpoint_ratio=1.0)
    assert predicted(QWEN, "moe_act+layernorm", checkpoint_ratio=1.0).step_ms == pytest.approx(whole.step_ms)


def test_bytes_of_a_token_are_those_of_the_tensors():
    # Norms in 16 bits keep their output, 2 h bytes each; the activation of an expert keeps its output, and the results of
    # experts are not kept once the router's shares are part of it: 2 bytes for each of 8 * 1536 and 8 * 4096 elements.
    facts = QWEN.facts(precision="bf16_pure", attention="sdpa", fusion=True)

    def block(*modules):
        return next(part for part in with_modules(facts, modules).parts if part.role == "block")

    assert block().saved.sequence - block("layernorm").saved.sequence == 2 * 2 * 4096
    assert block().saved.sharded - block("moe_act").saved.sharded == 2 * 8 * 1536
    assert block().saved.rows - block("moe_act").saved.rows == 2 * 8 * 4096
    assert block("moe").saved.rows == 0 and 0.5 < block("moe").rebuilt.products < 0.95


def test_names_are_checked():
    assert modules_of("moe_act+layernorm") == modules_of("layernorm moe_act") and modules_of(None) == frozenset()
    assert set(MODULES) >= {"moe_act", "layernorm", "mla_up_proj", "core_attn", "mlp"}
    with pytest.raises(UsageError, match="unknown module 'moeact'; did you mean 'moe_act'"):
        find_trainer("megatron").assuming({"recompute_modules": "moeact"})


def test_a_recomputed_mixture_keeps_no_rows_of_other_ranks_and_receives_them_again():
    def of_spread_experts(modules):
        """MiB of activations, and of recomputation, that experts on 32 ranks take beyond experts on each."""
        config = {**CONFIGS[DEEPSEEK], "tp": 1, "pp": 1, "dp": 256, "grad_accum": 1}
        setup = find_trainer("megatron").training(seq_len=4096, devices=256, loss="fused", recompute_modules=modules)
        estimator = Estimator(replace(DEEPSEEK, layers=24), "h800-80gb", setup, framework="megatron")
        spread, alone = (estimator({**config, "ep": ranks}).breakdown for ranks in (32, 1))
        return [spread[f"memory.{term}"] - alone[f"memory.{term}"] for term in ("activations", "recomputation")]

    rows = 4096 * 8 * 7168 * 2 / 2**20  # of a micro-batch: 4096 tokens, 8 rows each, 7168 numbers of 2 bytes in a row
    activations, recomputation = of_spread_experts(None)
    assert activations > (24 - 3) * rows and recomputation == 0
    activations, recomputation = of_spread_experts("moe")
    assert activations == pytest.approx(0) and recomputation > rows


def test_megatron_frees_a_gradient_of_its_own_once_it_is_in_the_buffer():
    def predicted_with(**conventions):
        setup = find_trainer("megatron").training(seq_len=4096, devices=256, **conventions)
        return Estimator(DENSE, "h800-80gb", setup, framework="megatron")(CONFIGS[DENSE])

    fused, apart = predicted_with(), predicted_with(gradient_copy=True)
    assert apart.peak_memory_mib == fused.peak_memory_mib and apart.step_ms > fused.step_ms
