"""Families spread over ranks compute the same as one process, dropout included, and report what they do not support."""

import re
from dataclasses import replace
from pathlib import Path

import numeric
import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
from redline.models import hugging_face
from redline.models.architecture import Architecture
from redline.models.families import schedule_of
from redline.models.families.tp_plans import tensor_plan
from redline.models.huggingface import hugging_face_workload
from redline.models.skeleton import skeleton
from redline.schedule import create_schedule
from redline.schedule.parallel.collectives import PlannedMesh
from redline.training import Training
from tiers import tiered
from transformers import BertConfig

QUICK = [
    ("bert", "tp2+sp"),
    ("bert", "pp2 zbv"),
    ("t5", "tp2"),
    ("t5", "pp2 1f1b"),
    ("mixtral", "tp2+sp"),
    ("vit", "pp2 1f1b"),
    ("llama", "pp2 interleaved"),
    ("gpt2", "pp2 zero bubble"),
    ("llama", "pp2 uneven"),
    ("wide_resnet", "tp2"),
    ("albert", "tp2"),
    ("llama", "sp2"),
    ("bert", "sp2"),
    ("llama", "cp2"),
    ("mistral", "cp2+zero3"),
    ("opt", "zero3+kernels"),
    ("t5", "pp2+kernels"),
    ("mixtral", "ep2"),
    ("deepseek_v3", "ep2+zero3"),
    ("mixtral", "ep2+capacity"),
    ("mixtral", "ep2·tp2 etp1"),
    ("qwen3_moe", "ep2·tp2 etp1+sp"),
    ("llama", "runs tp1/tp2"),
    ("gpt2", "runs zero1/zero3"),
]
"""Every way of spreading at least once, and for every family its special ways."""
MORE = [
    *(("bert", cell) for cell in ("tp2", "zero3", "pp2 1f1b", "kernels", "tp2+kernels")),
    *(("t5", cell) for cell in ("tp2+sp", "zero3", "pp2 zbv")),
    *(("mixtral", cell) for cell in ("tp2", "zero3", "pp2 1f1b", "pp2 zbv")),
    ("llama", "kernels"),
    *((family, "sp2") for family in ("gpt2", "mistral", "albert", "mixtral")),
    *((family, "cp2") for family in ("bert", "gpt2", "mistral", "albert", "mixtral")),
    *(("mixtral", cell) for cell in ("ep2+zero1", "ep2+zero2", "ep2+zero3", "ep2·cp2", "ep2+fusion")),
    *(("qwen3_moe", cell) for cell in ("ep2", "ep2+zero1", "ep2+capacity", "tp2 etp1")),
    *(("deepseek_v3", cell) for cell in ("ep2", "tp2", "pp2 1f1b", "ep2+capacity", "ep2·tp2 etp1")),
    *((family, "runs tp1/tp2") for family in ("bert", "gpt2", "mistral", "mixtral", "deepseek_v3")),
    *((family, "runs zero2/zero3") for family in ("llama", "mixtral")),
    ("opt", "pp2 1f1b"),
    ("gpt2", "tp2+kernels"),
]
TABLE = (Path(__file__).parents[2] / "bench" / "results" / "numerics.md").read_text()
CELLS = [(family, cell) for family in numerics.FAMILIES for cell in numerics.COMBINATIONS]


@pytest.fixture(scope="module", autouse=True)
def imported():
    # Imported once, before ranks are forked.
    import transformers.models.albert.modeling_albert
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.opt.modeling_opt
    import transformers.models.t5.modeling_t5
    import transformers.models.vit.modeling_vit  # noqa: F401


def hold(pool, family, combination, seed):
    cell = numerics.tiny(family, combination), numerics.COMBINATIONS[combination], seed
    alone = numerics.ranks(combination) == 1
    for found in [numeric.departure(*cell)] if alone else pool.run(numeric.departure, *cell):
        numeric.hold(found)


@pytest.mark.parametrize(("family", "combination"), tiered(QUICK, MORE))
def test_a_family_computes_what_one_process_computes(two, seed, family, combination):
    hold(two, family, combination, seed)


@pytest.mark.parametrize("combination", ["sp2·tp2", "sp2·dp2+zero3", "pp2·sp2", "cp2·tp2", "cp2·sp2", "pp2·cp2"])
def test_sequences_are_cut_beside_all_else(four, seed, combination):
    hold(four, "llama", combination, seed)


STYLES = {
    "phi3": ("colwise_gather_output", "rowwise_split_input"),
    "olmo2": ("colwise_gather_output", "rowwise_split_input"),
    "glm": ("rowwise_split_input",),
    "granite_swa": ("local_params",),
    "deepseek_v2": ("mla_kv_a_proj",),
    "deepseek_v3": (),
    "gemma3_text": (),
    "glm4_moe": (),
    "phi": (),
    "cohere": (),
    "esmc": (),
    "apertus": (),
    "kimi_linear": (),
}
"""Families whose plans have styles that no family of the table has. DeepSeek-V3's plan does not split attention, and Gemma's
embedding scales its rows. The next five leave out weights between cut projections: norms of a head, of each head and of all
heads, and a trained activation. Kimi has layers of linear attention beside latent attention, with projections of the same
names."""
SIZES = {
    "glm": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "head_dim": 8},
    "glm4_moe": {
        "head_dim": 8, "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "phi": {"qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
    "esmc": {"num_key_value_heads": 4},
    "kimi_linear": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


def styled(family, **more):
    similar = family if family in numerics.FAMILIES else "deepseek_v3" if family == "deepseek_v2" else "llama"
    arguments = {**numerics.FAMILIES[similar][1], **SIZES.get(family, {}), **more}
    task = "masked" if family in ("esmc", "neomme") else "causal"
    made = Architecture(model_type=family, arguments=arguments, task=task)
    return hugging_face_workload(made, name=family, spec=family, seq_len=16, global_batch=8)


@pytest.mark.parametrize(
    "family",
    tiered(
        ["phi3", "deepseek_v2", "gemma3_text", "glm4_moe", "cohere"],
        ["olmo2", "glm", "granite_swa", "deepseek_v3", "phi", "esmc", "apertus", "kimi_linear"],
    ),
)
def test_plan_styles_outside_the_table_compute_the_same(two, seed, family):
    workload = styled(family)
    plan = set(tensor_plan(create_schedule(skeleton(workload))).values())
    assert set(STYLES[family]) <= plan
    for found in two.run(numeric.departure, workload, {"tp": 2}, seed):
        numeric.hold(found)


def balanced(**config):
    """A mixture whose experts are balanced by a loss, and a configuration with one micro-batch."""
    task, arguments = numerics.FAMILIES["mixtral"]
    more = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    made = Architecture(model_type="mixtral", arguments={**arguments, **more}, task=task)
    return hugging_face_workload(made, name="balanced", spec="balanced", seq_len=16, global_batch=8), config


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_are_balanced_over_all_replicas_as_in_one_process(two, seed, zero):
    for found in two.run(numeric.departure, *balanced(dp=2, ep=2, zero=zero), seed):
        numeric.hold(found)


def test_tokens_of_whole_experts_are_balanced_together_with_a_cut_sequence(two, seed):
    for found in two.run(numeric.departure, *balanced(tp=2, ep=2, etp=1, sequence_parallel=True), seed):
        numeric.hold(found)


def test_a_pipeline_refuses_to_balance_experts_of_other_stages():
    workload, _ = balanced()
    message = numerics.refusal(workload, {"pp": 2})
    assert message.startswith("pp: the loss that balances the 4 experts needs all blocks (output_router_logits)")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "combination", [cell for cell in numerics.COMBINATIONS if cell.startswith(("ep2·", "ep4", "tp2 etp1"))]
)
def test_experts_are_spread_beside_all_else(two, four, seed, family, combination):
    if family == "deepseek_v3" and combination.endswith("+sp"):
        assert numerics.obstacle(family, combination).startswith("sequence_parallel: no module around")
        return
    hold({2: two, 4: four}[numerics.ranks(combination)], family, combination, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "combination"), [cell for cell in CELLS if cell not in (*QUICK, *MORE)])
def test_every_family_in_every_combination(two, four, seed, family, combination):
    reason = numerics.obstacle(family, combination)
    if reason:
        # The page says once, for all families, that those without experts refuse to spread them.
        dense = "the model has no experts, so " in reason
        assert dense or f"{family}: {reason}.\n" in TABLE, "a reason that the page does not give"
        return
    hold({1: None, 2: two, 4: four}[numerics.ranks(combination)], family, combination, seed)


def check_t5_tiny(seed):
    from redline import workload
    from transformers import T5Config

    preset = T5Config.from_dict(dict(workload("t5-tiny").model.arguments))
    preset.dropout_rate, preset.num_layers, preset.num_decoder_layers = 0.0, 2, 2
    made = hugging_face(preset, seq_len=16, global_batch=4)
    return numeric.departure(made, {"tp": 2, "micro_batch": 4}, seed)


def test_a_bias_of_as_many_heads_as_a_head_has_features_is_cut_right(two, seed):
    for found in two.run(check_t5_tiny, seed):
        numeric.hold(found)


# Planted faults: one at a time, after the passes of a spread training. Each must be noticed.


def one_weight(training, name="transformer.h.0.mlp.c_fc.weight"):
    return training.model.get_parameter(name)


def a_gradient_scaled_by_a_thousandth(training, step):
    one_weight(training).grad.mul_(1.001)


def one_element_summed_instead_of_averaged(training, step):
    grad = one_weight(training).grad.view(-1)
    grad[grad.abs().argsort()[len(grad) // 2]] *= 2


def a_learning_rate_too_large_by_a_hundredth(training, step):
    for group in training.optimizer.param_groups:
        group["lr"] = numerics.LEARNING_RATE * 1.01


def a_momentum_that_is_lost(training, step):
    if step == 1:
        training.optimizer.state[one_weight(training)]["exp_avg"].zero_()


def a_weight_that_is_not_stepped(training, step):
    if step == 2:
        one_weight(training).grad = None


def gradients_summed_instead_of_averaged(training, step):
    for each in training.model.parameters():
        each.grad.mul_(2)


def with_fault(fault, config, seed):
    class Faulty(Training):
        def passes(self):
            loss = super().passes()
            if self.world.dp > 1:
                fault(self, self._step - 1)
            return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "Training", Faulty)
        return numeric.departure(numerics.tiny("gpt2"), {"dp": 2, "micro_batch": 2, **config}, seed)


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        (a_gradient_scaled_by_a_thousandth, {}),
        (one_element_summed_instead_of_averaged, {}),
        (a_learning_rate_too_large_by_a_hundredth, {}),
        (a_momentum_that_is_lost, {}),
        (a_weight_that_is_not_stepped, {}),
        (gradients_summed_instead_of_averaged, {"precision": "bf16"}),
        (gradients_summed_instead_of_averaged, {"precision": "bf16_pure"}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(map(str, getattr(value, "values", list)()))),
)
def test_a_small_fault_is_noticed(two, seed, fault, config):
    for found in two.run(with_fault, fault, config, seed):
        assert not found.holds and found.largest_of("loss").holds
        worst = max(found.largest_of("gradients").share, found.largest_of("weights").share)
        numeric.caught(worst, 1.0, fault.__name__)


def without_sum(sch, config):
    schedule_of("gpt2")(sch, config)
    if config.get("tp", 1) > 1:
        # The hook that sums the gradients of the attention's input.
        sch["transformer.h.0.attn"].module._forward_pre_hooks.clear()


def check_notices(change, seed):
    broken = replace(numerics.tiny("gpt2"), schedule=change)
    return numeric.departure(broken, {"tp": 2}, seed)


def test_an_exchange_that_is_missing_is_noticed(two, seed):
    for found in two.run(check_notices, without_sum, seed):
        assert not found.holds and found.largest_of("loss").holds
        gradient = found.largest_of("gradients")
        numeric.caught(gradient.by, gradient.allowed, "a missing sum")


def check_dropout(sequence_parallel):
    from transformers import T5Config

    made = hugging_face(
        T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=64, vocab_size=96, dropout_rate=0.25),
        seq_len=64,
        global_batch=8,
    )
    knobs = {"tp": 2, "sequence_parallel": sequence_parallel, "attention": "eager"}
    training = Training(made, knobs, torch.device("cpu"), rank=dist.get_rank(), world_size=2)
    masks = {}

    def note(name):
        def hook(module, args, output):
            masks.setdefault(name, (output == 0) & (args[0] != 0))

        return hook

    layer = training.model.encoder.block[0].layer[1]
    layer.DenseReluDense.dropout.register_forward_hook(note("inner"))
    layer.dropout.register_forward_hook(note("behind"))
    training.model.encoder.dropout.register_forward_hook(note("embedding"))
    training.passes()
    found = {}
    for name, mask in masks.items():
        both = [torch.empty_like(mask) for _ in range(2)]
        dist.all_gather(both, mask)
        found[name] = (float((both[0] == both[1]).float().mean()), float(mask.float().mean()))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_agrees_where_ranks_have_the_same_and_differs_where_not(two, sequence_parallel):
    # Two independent masks of rate p agree in p^2 + (1 - p)^2 of their places, of which there are 8,192 or more: five
    # standard errors are 0.03, and 0.02 for a mask's own rate. Half of the inner values are zero after the activation,
    # so that nothing can be concluded there.
    independent = 0.25**2 + 0.75**2
    first, second = two.run(check_dropout, sequence_parallel)
    for found in (first, second):
        assert found["embedding"][0] == 1.0
        assert found["embedding"][1] == pytest.approx(0.25, abs=0.02)
        assert found["behind"][1] == pytest.approx(0.25, abs=0.02)
        assert found["inner"][0] < 0.95
        if sequence_parallel:
            assert found["behind"][0] == pytest.approx(independent, abs=0.03)
        else:
            assert found["behind"][0] == 1.0


# Unsupported strategies and their reasons


def supported(family):
    made = numerics.tiny(family)
    return made.schedule.support(create_schedule(skeleton(made)))


def test_sizes_that_ranks_do_not_divide_are_padded_or_refused_in_words():
    # The vocabulary of 97 is named once, with its embedding, though the head is tied to it.
    assert supported("gpt2").padding(2) == "the 97 rows of 'transformer.wte.weight' are padded to 98"
    assert supported("gpt2").padding(1) == supported("vit").padding(2) == ""
    assert "padded to 100" in supported("bert").padding(4)
    small = numerics.FAMILIES["bert"][1] | {"intermediate_size": 66}
    wide = hugging_face(BertConfig(**small))
    support = wide.schedule.support(create_schedule(skeleton(wide)))
    assert support.tp(2) is None and "4 ranks must divide the size 66" in support.tp(4)
    assert support.padding(4) == ""


@pytest.mark.parametrize(
    ("family", "rates", "sequence_parallel", "expected"),
    [
        ("deepseek_v3", {"attention_dropout": 0.1}, False, {"self_attn", "mlp", "mlp.shared_experts", "mlp.experts"}),
        ("gpt_neox", {"hidden_dropout": 0.1}, False, {"attention", "mlp"}),
        (
            "gpt_neox", {"hidden_dropout": 0.1}, True, {"attention", "mlp", "post_attention_dropout", "post_mlp_dropout"},
        ),
        ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.1}, False, set()),
        ("seed_oss", {"attention_dropout": 0.1, "residual_dropout": 0.1}, True, {"self_attn", "mlp"}),
        ("seed_oss", {"attention_dropout": 0.1, "residual_dropout": 0.0}, False, {"self_attn", "mlp"}),
    ],
)  # fmt: skip
def test_random_streams_differ_where_activations_are_cut_and_only_there(family, rates, sequence_parallel, expected):
    made = styled(family, **rates)
    sch = create_schedule(skeleton(made), PlannedMesh(tp=2))
    made.schedule(sch, {"tp": 2, "sequence_parallel": sequence_parallel})
    steps = [each.path.split("layers.", 1)[1] for each in sch.tree.steps if each.primitive == "fork_rng"]
    assert {each.partition(".")[2] for each in steps} == expected and len(steps) == len(set(steps))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("doge", "tp: 'model.layers.0.self_attn' lies between cut projections"),
        ("neomme", "tp: 'model.layers.0.self_attn' adds values of all heads"),
    ],
)
def test_what_a_plan_leaves_out_between_cut_projections_is_refused(family, reason):
    made = styled(family)
    support = made.schedule.support(create_schedule(skeleton(made)))
    assert support.tp(2).startswith(reason)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4},
            "pp: later blocks read keys of earlier ones beside the hidden states",
        ),
        (
            {"hidden_size_per_layer_input": 8},
            "pp: transformers' pipeline plan does not show whether 'model.embed_tokens_per_layer' is called before",
        ),
        ({}, None),
    ],
)  # fmt: skip
def test_a_pipeline_refuses_what_passes_between_blocks_beside_hidden_states(more, reason):
    made = styled("gemma4_text", **more)
    found = made.schedule.support(create_schedule(skeleton(made))).pp(2)
    assert found is None if reason is None else found.startswith(reason)


PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


SMALL = """
config = DistilBertConfig(n_layers=2, dim=32, n_heads=4, hidden_dim=64, vocab_size=97, dropout=0, attention_dropout=0)
small = hugging_face(config, schedule=schedule, seq_len=16, global_batch=8)
"""


def execute(blocks):
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def departs(blocks, name, knobs):
    return not numerics.departure(execute(blocks)[name], knobs).holds


def test_the_guide_adds_a_model_in_under_forty_lines(two, tmp_path):
    from redline.models import workload

    file, support, _ = BLOCKS
    assert len(file.splitlines()) < 40
    for knobs in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "grad_accum": 4}, {"dp": 2, "zero": 3}):
        assert two.run(departs, [file, SMALL], "small", knobs) == [False, False]
    execute([file, support])
    (tmp_path / "distilbert.py").write_text(file)
    made = workload(f"{tmp_path}/distilbert.py:workload", global_batch=16)
    assert made.global_batch == 16 and made.seq_len == 512


def test_the_guide_adds_a_model_with_experts_in_under_forty_lines(two):
    _, _, file = BLOCKS
    assert len([line for line in file.splitlines() if line]) < 40
    for knobs in ({"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero": 3}):
        assert two.run(departs, [file], "workload", knobs) == [False, False]
