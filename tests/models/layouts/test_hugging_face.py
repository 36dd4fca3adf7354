"""transformers' checkpoints: reading matches from_pretrained, writing matches save_pretrained."""

import json
import os
import struct

import pytest
import torch
import transformers
from checkpoints import architecture, differing, filled, lazy, saved, weights_of
from numerics_table import FAMILIES
from redline.base._transformers import quiet
from redline.base.errors import UsageError, WorkloadError
from redline.models.layouts.hugging_face import find_weights, hugging_face, write_hugging_face
from redline.models.layouts.safetensors_files import stored_tensors
from redline.models.layouts.weights import Weights
from safetensors.torch import load_file, save_file

MADE = {
    **{family: architecture(family) for family in FAMILIES if family != "wide_resnet"},
    "llama, tied": architecture("llama", tie_word_embeddings=True),
    "gemma2": architecture("gemma2", head_dim=8),
    "qwen3_moe": architecture("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "phi3": architecture("phi3"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_checkpoint_is_read_and_written_bit_for_bit(name, tmp_path):
    made = MADE[name]
    model = filled(made)
    theirs = saved(model, tmp_path / "theirs", max_shard_size="50KB")
    weights = find_weights(theirs, made)
    assert differing(weights, model) == []
    write_hugging_face(weights, made, tmp_path / "ours", max_shard_bytes=50_000)
    kept, written = stored_tensors(theirs), stored_tensors(tmp_path / "ours")
    assert {key: each.shape for key, each in written.items()} == {key: each.shape for key, each in kept.items()}
    with quiet():
        again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
        body = transformers.AutoModel.from_pretrained(tmp_path / "ours")
    assert not any(info.values()), info
    assert differing(weights_of(again), model) == []
    inner = getattr(model, model.base_model_prefix, model)
    assert body.state_dict().keys() & inner.state_dict().keys()
    assert [n for n, each in inner.state_dict().items() if not torch.equal(each, body.state_dict().get(n, each))] == []


def test_a_box_of_experts_that_are_stored_one_by_one_is_read_alone(tmp_path):
    made = MADE["mixtral"]
    model = filled(made)
    weights = hugging_face(saved(model, tmp_path), made)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in stored_tensors(tmp_path)
    box = (slice(1, 3), slice(32, 96), slice(8, 16))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(weights.tensors[name].read(box), model.state_dict()[name][box])


def test_configuration_and_generation_settings_are_those_of_save_pretrained(tmp_path):
    made = MADE["llama"]
    model = filled(made)
    theirs = saved(model, tmp_path / "theirs")
    write_hugging_face(hugging_face(theirs, made), made, tmp_path / "ours")
    for file in ("config.json", "generation_config.json"):
        expected, found = (json.loads((tmp_path / each / file).read_text()) for each in ("theirs", "ours"))
        # It is switched off for training only.
        assert found.pop("use_cache") is True and expected.pop("use_cache") is False
        assert found == expected
    assert sorted(os.listdir(tmp_path / "ours")) == ["config.json", "generation_config.json", "model.safetensors"]
    with open(tmp_path / "ours" / "model.safetensors", "rb") as file:
        assert b'"format":"pt"' in file.read(200)


def test_a_checkpoint_of_the_body_alone_has_no_head_and_one_of_a_tied_model_needs_none(tmp_path):
    made = MADE["gpt2"]
    model = filled(made)
    body = saved(model.transformer, tmp_path / "body")
    assert "wte.weight" in stored_tensors(body)
    assert differing(hugging_face(body, made), model) == []
    untied = saved(filled(MADE["llama"]).model, tmp_path / "untied")
    with pytest.raises(WorkloadError, match=r"1 tensor is missing: lm_head\.weight"):
        hugging_face(untied, MADE["llama"])


def test_names_of_old_checkpoints_are_followed(tmp_path):
    made = MADE["bert"]
    model = filled(made)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file(old, tmp_path / "model.safetensors")
    assert differing(hugging_face(tmp_path, made), model) == []


def test_another_head_and_computed_buffers_are_left_out_with_a_note(tmp_path):
    made = MADE["bert"]
    model = filled(made)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = hugging_face(tmp_path, made)
    assert differing(weights, model) == []
    assert [each.split(": ", 1)[1] for each in weights.notes] == [
        "cls.seq_relationship.weight was left out, for which the model has no place"
    ]


def test_a_padded_vocabulary_is_refused_with_both_shapes(tmp_path):
    folder = saved(filled(architecture("llama", vocab_size=128)), tmp_path)
    with pytest.raises(WorkloadError, match=r"embed_tokens\.weight with \(128, 32\) there, \(97, 32\) in the model"):
        hugging_face(folder, MADE["llama"])


@pytest.mark.parametrize(
    ("family", "other", "message"),
    [
        ("llama", {"num_hidden_layers": 3},
         r"9 tensors are missing: model\.layers\.2\.self_attn\.q_proj\.weight; .* and 4 more\. Give the model that"),
        ("llama", {"num_hidden_layers": 1}, r"9 tensors are not in the model: model\.layers\.1\."),
        ("llama", {"intermediate_size": 80},
         r"6 tensors have another shape: .*model\.layers\.0\.mlp\.gate_proj\.weight with \(64, 32\) there, \(80, 32\) in"),
        ("qwen2", {}, r"6 tensors are missing: model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("gpt2", {}, r"another model than this gpt2 \(GPT2LMHeadModel\)\. \d+ tensors are missing"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused_by_what_differs(family, other, message, tmp_path):
    folder = saved(filled(MADE["llama"]), tmp_path)
    with pytest.raises(WorkloadError, match=message):
        hugging_face(folder, architecture(family, **other))


def test_unreadable_checkpoints_are_refused_with_the_reason(tmp_path):
    made = MADE["llama"]
    with pytest.raises(WorkloadError, match=r"there is no checkpoint '.*nothing'"):
        find_weights(tmp_path / "nothing", made)
    with pytest.raises(WorkloadError, match=r"contains neither model\.safetensors nor model\.safetensors\.index\.json"):
        find_weights(tmp_path, made)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(WorkloadError, match=r"pytorch_model\.bin and no safetensors; such a file may be a pickle"):
            find_weights(path, made)
    folder = saved(filled(made), tmp_path / "sharded", max_shard_size="50KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WorkloadError, match=r"cannot be read as safetensors: .*; give a complete file"):
        find_weights(folder, made)
    header = json.dumps({"packed": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    shard.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(WorkloadError, match=r"cannot be read as safetensors: .*; give a complete file, without packed"):
        find_weights(folder, made)
    shard.unlink()
    with pytest.raises(WorkloadError, match=rf"lacks .*, and \d+ tensors in all, which .* lists in {shard.name}"):
        find_weights(folder, made)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_leads_to_no_file_outside_its_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(WorkloadError, match=r"lacks a, and 1 tensors in all, which"):
        find_weights(tmp_path, MADE["llama"])


def test_dtypes_are_kept_or_as_asked(tmp_path):
    made = MADE["llama"]
    model = filled(made).bfloat16()
    weights = hugging_face(saved(model, tmp_path / "bf16"), made)
    assert {tensor.dtype for tensor in weights.tensors.values()} == {torch.bfloat16}
    write_hugging_face(weights, made, tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == "bfloat16"
    write_hugging_face(weights, made, tmp_path / "wider", dtype=torch.float32)
    assert {each.dtype for each in stored_tensors(tmp_path / "wider").values()} == {torch.float32}
    assert torch.equal(
        hugging_face(tmp_path / "wider", made).tensors["lm_head.weight"].read(), model.lm_head.weight.float()
    )


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    made = MADE["llama"]
    model = filled(made)

    def failing_read(box):
        raise OSError(28, "No space left on device")

    tensors = {**weights_of(model).tensors}
    last = lazy(model.lm_head.weight)
    last.read_box = failing_read
    tensors["lm_head.weight"] = last
    with pytest.raises(UsageError, match=r"cannot write '.*out': No space left on device; nothing was left there"):
        write_hugging_face(Weights(tensors), made, tmp_path / "out", max_shard_bytes=20_000)
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").mkdir()
    write_hugging_face(weights_of(model), made, tmp_path / "out")
    with pytest.raises(UsageError, match=r"'.*out' is not empty, and a checkpoint is written to a new folder"):
        write_hugging_face(weights_of(model), made, tmp_path / "out")


def test_a_tokenizer_s_files_are_copied_and_no_weights_or_code(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt",
             "spiece.model", "chat_template.jinja"]  # fmt: skip
    for name in [*names, "model.safetensors", "config.json", "tokenization_x.py", "pytorch_model.bin"]:
        (source / name).write_text(name)
    made = MADE["llama"]
    write_hugging_face(weights_of(filled(made)), made, tmp_path / "out", tokenizer=source)
    copied = set(os.listdir(tmp_path / "out")) - {"config.json", "generation_config.json", "model.safetensors"}
    assert copied == set(names)
    assert (tmp_path / "out" / "config.json").read_text() != "config.json"
    with pytest.raises(UsageError, match=r"'.*out.*' contains no tokenizer"):
        write_hugging_face(weights_of(filled(made)), made, tmp_path / "more", tokenizer=tmp_path / "outside")
