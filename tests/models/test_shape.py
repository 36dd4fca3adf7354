"""The shape of a model, as run.yaml stores it."""

import json

import pytest
import redline as rl
from redline.estimator.trainers import numbers_of
from redline.models.architecture import PLAIN_DECODERS, shape_of
from redline.models.presets import PRESETS
from torch import nn

LANGUAGE = [name for name, preset in PRESETS.items() if preset.task in ("causal", "masked")]


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_presets_shape_is_that_of_its_table(name):
    found = shape_of(rl.workload(name).model)
    assert found["family"] == PRESETS[name].model_type
    expected = PRESETS[name].shape()
    assert {word: found[word] for word in expected} == expected
    json.dumps(found)  # plain data


@pytest.mark.parametrize("name", [name for name in LANGUAGE if PRESETS[name].model_type in PLAIN_DECODERS])
def test_the_sizes_of_a_plain_decoder_give_its_parameters(name):
    # Qwen's biases and norms of queries and keys are not among the sizes.
    facts = numbers_of(shape_of(rl.workload(name).model)).facts(precision="bf16", attention="sdpa", fusion=False)
    assert facts.parameters == pytest.approx(PRESETS[name].parameters, rel=1e-3)


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
