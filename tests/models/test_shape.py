"""The shape of a model, as run.yaml stores it."""

import json

import pytest
import redline as rl
from redline.models.architecture import shape_of
from redline.models.presets import PRESETS

LANGUAGE = [name for name, preset in PRESETS.items() if preset.task in ("causal", "masked")]


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_presets_shape_is_that_of_its_table(name):
    found = shape_of(rl.workload(name).model)
    assert found["family"] == PRESETS[name].model_type
    expected = PRESETS[name].shape()
    assert {word: found[word] for word in expected} == expected
    json.dumps(found)  # plain data


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


@pytest.mark.parametrize("name", ["t5-tiny", "vit-tiny", "wide-resnet-tiny"])
def test_models_without_blocks_over_tokens_have_no_shape(name):
    assert shape_of(rl.workload(name).model) is None
