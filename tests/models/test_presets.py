import pytest
import torch
from redline.models import list_presets, workload
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
    "llama2-7b": 6738.4,
    "llama3-8b": 8030.3,
    "qwen3-0.6b": 596.0,
}


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
    assert model.get_input_embeddings().num_embeddings == shape["vocabulary"]
    assert model.config.hidden_size == shape["hidden"]
    assert model.config.num_attention_heads == shape["heads"]
    assert made.unit == "tokens/s"


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_parameter_counts_are_the_published_ones(name):
    assert PRESETS[name].parameters / 1e6 == pytest.approx(PUBLISHED_MILLIONS[name], abs=0.06)


def test_every_preset_is_listed_with_what_the_command_shows():
    rows = list_presets()
    assert {row["name"] for row in rows} == {*PUBLISHED_MILLIONS, "gpt2-tiny", "bert-tiny", "llama-tiny"}
    for row in rows:
        shape = ["layers", "hidden", "heads", "vocabulary"]
        assert list(row) == ["name", "family", "parameters", *shape, "seq_len", "global_batch"]
        assert row["seq_len"] == (64 if row["name"].endswith("-tiny") else PRESETS[row["name"]].seq_len)


def test_flops_are_those_of_the_formula():
    made = workload("gpt2-tiny")
    shape = PRESETS["gpt2-tiny"].shape()
    layers, hidden, vocabulary, length = shape["layers"], shape["hidden"], shape["vocabulary"], 64
    products = 12 * layers * hidden**2 + vocabulary * hidden
    attention = 2 * layers * length * hidden
    assert made.flops.per_sample == 3 * length * 2 * (products + attention)
    assert made.flops.reason == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_flops_of_every_preset_are_near_six_per_parameter_and_token(name):
    made = workload(name)
    ratio = made.flops.per_sample / (6 * PRESETS[name].parameters * made.seq_len)
    # Embeddings that are not tied cost nothing, attention adds: most for the longest sequences.
    assert 0.6 < ratio < 1.9


def test_ids_differ_with_what_a_workload_is_and_with_nothing_else():
    made = workload("gpt2-tiny")
    assert made.id == workload("gpt2-tiny").id
    others = [
        workload("llama-tiny"),
        workload("gpt2-tiny", seq_len=32),
        workload("gpt2-tiny", global_batch=16),
    ]
    assert len({made.id, *(each.id for each in others)}) == 4
