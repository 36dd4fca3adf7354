"""The shape of a model, as run.yaml stores it."""

import json
from dataclasses import replace

import pytest
import redline as rl
from redline.estimator.trainers import numbers_of
from redline.models.architecture import STATED, shape_of
from redline.models.presets import PRESETS
from redline.models.resolve import stated
from redline.models.server_model import ServerModel
from torch import nn

LANGUAGE = [name for name, preset in PRESETS.items() if preset.task in ("causal", "masked")]


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_presets_shape_is_that_of_its_table(name):
    found = shape_of(rl.workload(name).model)
    assert found["family"] == PRESETS[name].model_type
    expected = PRESETS[name].shape()
    assert {word: found[word] for word in expected} == expected
    json.dumps(found)  # plain data


@pytest.mark.parametrize("name", [name for name in LANGUAGE if PRESETS[name].model_type in STATED])
def test_sizes_that_a_configuration_states_are_those_that_transformers_reads(name):
    workload, found = rl.workload(name), stated(name)
    one, other = numbers_of(found.shape), numbers_of(shape_of(workload.model))
    assert replace(one, head_dim=one.head_dim or one.hidden // one.heads) == (
        replace(other, head_dim=other.head_dim or other.hidden // other.heads)
    )
    assert (found.name, found.seq_len, found.global_batch) == (workload.name, workload.seq_len, workload.global_batch)
    # Qwen's biases and norms of queries and keys are not among the sizes.
    facts = one.facts(precision="bf16", attention="sdpa", fusion=False)
    assert facts.parameters == pytest.approx(PRESETS[name].parameters, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "deepseek-v3-tiny"])
def test_a_file_states_sizes_if_it_leaves_none_out(tmp_path, name):
    preset, file = PRESETS[name], tmp_path / "config.json"
    whole = {"model_type": preset.model_type, **preset.arguments}
    file.write_text(json.dumps(whole))
    workload = rl.workload(tmp_path)
    for target in (tmp_path, str(file), ServerModel.of(whole)):
        found = stated(target)
        assert numbers_of(found.shape) == numbers_of(stated(name).shape)
        assert (found.seq_len, found.global_batch) == (workload.seq_len, workload.global_batch)
    assert stated(tmp_path).name == workload.name
    for missing in ("n_layer" if "n_layer" in whole else "num_hidden_layers", "vocab_size"):
        file.write_text(json.dumps({key: value for key, value in whole.items() if key != missing}))
        assert stated(file) is None, "transformers has a default"
    file.write_text(json.dumps({**whole, "architectures": ["LlamaForSequenceClassification"]}))
    assert stated(file) is None


def test_sizes_that_transformers_would_refuse_are_not_stated():
    assert stated("gpt2", 1025) is None and stated("gpt2", 1024) is not None, "positions are learned"
    assert stated("llama3-8b", 1) is None and stated("no-such-model") is None
    assert stated(ServerModel.of({"model_type": ["llama"]})) is None
    whole = {"model_type": "gpt2", **PRESETS["gpt2"].arguments}
    for name in ("n_embd", "n_positions", "n_inner"):
        assert stated(ServerModel.of({**whole, name: "many"})) is None


def test_a_configuration_files_shape_is_what_it_says(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6,
                "num_key_value_heads": 2, "intermediate_size": 200, "vocab_size": 500,
                "max_position_embeddings": 256, "attention_bias": True, "tie_word_embeddings": True,
                "rope_theta": 20000.0,
            }
        )
    )  # fmt: skip
    found = shape_of(rl.workload(tmp_path).model)
    assert found["family"] == "llama" and found["rope"]["rope_theta"] == 20000.0
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "positions")
    assert [found[word] for word in sizes] == [3, 96, 6, 2, 16, 200, 500, 256]
    assert found["attention_bias"] is True and found["tied"] is True


def test_the_default_mlp_is_four_times_as_wide():
    assert shape_of(rl.workload("gpt2").model)["intermediate"] == 3072
    assert shape_of(rl.workload("opt-350m").model)["intermediate"] == 4096


@pytest.mark.parametrize("name", ["t5-tiny", "vit-tiny", "wide-resnet-tiny"])
def test_models_without_blocks_over_tokens_have_no_shape(name):
    assert shape_of(rl.workload(name).model) is None


def test_a_model_of_ones_own_has_none():
    assert shape_of(lambda: nn.Linear(2, 2)) is None
