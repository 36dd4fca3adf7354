import numerics_table as numerics
import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models import flops_of, list_presets, workload
from redline.models.presets import PRESETS
from redline.schedule import create_schedule

PUBLISHED_MILLIONS = {
    "gpt2": 124.4,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "bert-base": 109.5,
    "bert-large": 335.2,
    "roberta-large": 355.4,
    "opt-350m": 331.2,
    "gpt-neo-1.3b": 1315.6,
    "qwen3-32b": 32762.1,
    "qwen3-30b-a3b": 30532.1,
    "gemma3-4b": 3880.3,
    "gemma3-12b": 11766.0,
    "gemma3-27b": 27009.3,
    "mistral-small-24b": 23572.4,
    "phi-4": 14659.5,
    "gpt-oss-20b": 20914.8,
    "gpt-oss-120b": 116829.2,
    "modernbert-base": 149.7,
    "modernbert-large": 395.9,
    "llama3-405b": 405853.4,
    "qwen2-7b": 7615.6,
    "mistral-7b": 7241.7,
    "mixtral-8x7b": 46702.8,
    "qwen3-235b-a22b": 235093.6,
    "deepseek-v3": 671026.4,
    "deepseek-v3-16b": 15706.5,
    "gpt-neox-20b": 20554.6,
    "llama3.2-1b": 1235.8,
    "llama2-7b": 6738.4,
    "llama2-13b": 13015.9,
    "llama2-70b": 68976.6,
    "llama3-70b": 70553.7,
    "qwen3-8b": 8190.7,
    "llama3-8b": 8030.3,
    "qwen3-0.6b": 596.0,
    "t5-base": 222.9,
    "t5-large": 737.7,
    "vit-base": 86.6,
    "vit-large": 304.3,
    "wide-resnet-28-10": 36.5,
}


TINY = {
    "deepseek-v3-tiny",
    "qwen3-moe-tiny",
    "gpt2-tiny",
    "bert-tiny",
    "llama-tiny",
    "t5-tiny",
    "mixtral-tiny",
    "vit-tiny",
    "wide-resnet-tiny",
}

IMAGES = [name for name, preset in PRESETS.items() if preset.task == "image"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_on_meta_with_its_parameters_and_blocks(name):
    made = workload(name)
    with torch.device("meta"):
        model = made.build_model()
    parameters = sum(each.numel() for each in model.parameters())
    assert all(each.is_meta and each.dtype == torch.float32 for each in model.parameters())
    assert parameters == PRESETS[name].parameters
    shape = PRESETS[name].shape()
    assert len(made.schedule.blocks(create_schedule(model))) == shape["layers"]
    assert made.unit == ("samples/s" if name in IMAGES else "tokens/s")
    if PRESETS[name].model_type == "wide_resnet":
        assert model.classifier.in_features == shape["hidden"]
        return
    if name not in IMAGES:
        assert model.get_input_embeddings().num_embeddings == shape["vocabulary"]
    assert model.config.hidden_size == shape["hidden"]
    assert model.config.num_attention_heads == shape["heads"]


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_parameter_counts_are_the_published_ones(name):
    assert PRESETS[name].parameters / 1e6 == pytest.approx(PUBLISHED_MILLIONS[name], abs=0.06)


def test_every_preset_is_listed_with_what_the_command_shows():
    rows = list_presets()
    assert {row["name"] for row in rows} == {*PUBLISHED_MILLIONS, *TINY}
    for row in rows:
        shape = ["layers", "hidden", "heads", "vocabulary"]
        assert list(row) == ["name", "family", "parameters", *shape, "seq_len", "global_batch"]
        tiny = row["name"].endswith("-tiny") and row["name"] not in IMAGES
        assert row["seq_len"] == (64 if tiny else PRESETS[row["name"]].seq_len)


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_no_sequence_length(name):
    with pytest.raises(WorkloadError, match="takes images, so seq_len must not be given, but is 64"):
        workload(name, seq_len=64)


def test_flops_are_those_of_the_formula():
    made = workload("gpt2-tiny")
    shape = PRESETS["gpt2-tiny"].shape()
    layers, hidden, vocabulary, length = shape["layers"], shape["hidden"], shape["vocabulary"], 64
    products = 12 * layers * hidden**2 + vocabulary * hidden
    attention = 2 * layers * length * hidden
    assert flops_of(made).per_sample == 3 * length * 2 * (products + attention)
    assert flops_of(made).reason == ""


def test_ids_differ_with_what_a_workload_is_and_with_nothing_else():
    made = workload("gpt2-tiny")
    assert made.id == workload("gpt2-tiny").id
    others = [
        workload("llama-tiny"),
        workload("gpt2-tiny", seq_len=32),
        workload("gpt2-tiny", global_batch=16),
    ]
    assert len({made.id, *(each.id for each in others)}) == 4


WIDTHS = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 97,
}
SMALL = {
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "phi3": {"num_key_value_heads": 2},
    "modernbert": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}


@pytest.mark.parametrize("family", SMALL)
def test_families_that_only_large_presets_have_train_alike_recomputed_and_without_logits(family):
    from redline.models import hugging_face
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[family](**WIDTHS, **SMALL[family], **tokens)
    made = hugging_face(config, seq_len=16, global_batch=8)
    for knobs in ({"checkpoint_ratio": 1.0}, {"kernels": True}):
        assert numerics.departure(made, knobs).holds, knobs
