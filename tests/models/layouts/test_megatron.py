"""Megatron-LM's checkpoints of Llama and GPT-2, compared with megatron-core if it is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import architecture, differing, filled, lazy, saved, weights_of
from redline.base.errors import WorkloadError
from redline.models.layouts.dcp import dcp_tensors, write_dcp
from redline.models.layouts.find import find_weights
from redline.models.layouts.hugging_face import hugging_face
from redline.models.layouts.megatron import write_megatron

SIDE = Path(__file__).parents[2] / "support" / "megatron_side.py"
CASES = {
    "llama": architecture("llama"),
    "llama, tied": architecture("llama", tie_word_embeddings=True),
    "gpt2": architecture("gpt2"),
}


def has_megatron():
    return importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")


@pytest.mark.skipif(not has_megatron(), reason="megatron-core is not installed")
@pytest.mark.parametrize("case", CASES)
def test_megatron_core_computes_what_the_model_does_and_what_it_saves_is_read(case, tmp_path):
    made = CASES[case]
    model = filled(made)
    write_megatron(weights_of(model), made, tmp_path / "ours")
    epsilon = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    asked = {
        "family": made.model_type, "ours": str(tmp_path / "ours"), "out": str(tmp_path), "ids": ids.tolist(),
        "sizes": {"epsilon": epsilon, "tied": model.config.tie_word_embeddings},
    }  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(SIDE), str(tmp_path / "asked.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        found = torch.load(tmp_path / "logits.pt")[..., :97]
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)
    for folder in ("theirs", "by_layer"):
        weights = find_weights(tmp_path / folder, made)
        assert "has 128 rows and the model's vocabulary 97; the first 97 were taken" in weights.notes[0]
        model.load_state_dict({name: weights.read(name) for name in weights.shapes})
        with torch.no_grad():
            expected = torch.load(tmp_path / "drawn.pt")[..., :97]
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_round_trips_bit_for_bit_and_converts_to_transformers(case, tmp_path):
    made = CASES[case]
    model = filled(made)
    write_megatron(hugging_face(saved(model, tmp_path / "hf"), made), made, tmp_path / "megatron")
    for path in (tmp_path / "megatron", tmp_path / "megatron" / "release"):
        weights = find_weights(path, made)
        assert differing(weights, model) == []
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    name = "model.layers.1.self_attn.k_proj.weight" if "llama" in case else "transformer.h.1.attn.c_attn.weight"
    box = (slice(3, 11), slice(5, 9))
    assert torch.equal(weights.read(name, box), model.state_dict()[name][box])


def test_llama_s_rows_are_ordered_by_query_group_with_the_gate_first(tmp_path):
    """megatron/core/transformer/attention.py splits each group's rows into its queries, key and value, in this order."""
    made = CASES["llama"]
    model = filled(made)
    write_megatron(weights_of(model), made, tmp_path)
    stored = {name: each.read() for name, each in dcp_tensors(tmp_path / "release").items()}
    for number, layer in enumerate(model.model.layers):
        rows = []
        q, k, v = (getattr(layer.self_attn, f"{each}_proj").weight for each in "qkv")
        for group in range(2):
            rows += [q[group * 16 : group * 16 + 16], k[group * 8 : group * 8 + 8], v[group * 8 : group * 8 + 8]]
        assert torch.equal(stored["decoder.layers.self_attention.linear_qkv.weight"][number], torch.cat(rows))
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        assert torch.equal(stored["decoder.layers.mlp.linear_fc1.weight"][number], torch.cat([gate, up]))
        norm = stored["decoder.layers.mlp.linear_fc1.layer_norm_weight"][number]
        assert torch.equal(norm, layer.post_attention_layernorm.weight)
    assert stored["embedding.word_embeddings.weight"].shape == (128, 32)
    assert torch.equal(stored["embedding.word_embeddings.weight"][:97], model.model.embed_tokens.weight)
    assert not stored["output_layer.weight"][97:].any()


def test_gpt2_s_matrices_are_turned_and_its_rows_go_by_head(tmp_path):
    made = CASES["gpt2"]
    model = filled(made)
    write_megatron(weights_of(model), made, tmp_path)
    stored = {name: each.read() for name, each in dcp_tensors(tmp_path / "release").items()}
    assert "output_layer.weight" not in stored
    for number, block in enumerate(model.transformer.h):
        for kind, whole in (("weight", block.attn.c_attn.weight.T), ("bias", block.attn.c_attn.bias)):
            parts = whole.split(32)
            rows = [part[head * 8 : head * 8 + 8] for head in range(4) for part in parts]
            assert torch.equal(stored[f"decoder.layers.self_attention.linear_qkv.{kind}"][number], torch.cat(rows))
        assert torch.equal(stored["decoder.layers.mlp.linear_fc2.weight"][number], block.mlp.c_proj.weight.T)
    assert torch.equal(stored["embedding.position_embeddings.weight"], model.transformer.wpe.weight)


def test_names_of_versions_with_separate_norms_and_optimizers_are_read(tmp_path):
    made = CASES["llama"]
    model = filled(made)
    write_megatron(weights_of(model), made, tmp_path / "new")
    apart = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    old = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": lazy(torch.ones(32))}
    for name, each in dcp_tensors(tmp_path / "new" / "release").items():
        for now, before in apart.items():
            name = name.replace(now, before)
        old[name] = each
    assert "decoder.layers.input_layernorm.weight" in old
    later, newest = tmp_path / "run" / "iter_0000120", tmp_path / "run" / "iter_0000100"
    for folder in (later, newest):
        folder.mkdir(parents=True)
    write_dcp(old, newest)
    (newest / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    assert differing(find_weights(tmp_path / "run", made), model) == []


def test_another_model_is_refused_by_megatron_s_names(tmp_path):
    made = CASES["llama"]
    model = filled(made)
    write_megatron(weights_of(model), made, tmp_path / "out")
    with pytest.raises(WorkloadError, match=r"decoder\.layers\.\S+ has 2 layers, the model 3"):
        find_weights(tmp_path / "out", architecture("llama", num_hidden_layers=3))
    message = r"linear_qkv\.weight with \(2, 64, 32\) there, \(2, 96, 32\) in the model"
    with pytest.raises(WorkloadError, match=message):
        find_weights(tmp_path / "out", architecture("llama", num_key_value_heads=4))
    with pytest.raises(
        WorkloadError, match=r"by Megatron-LM's names: 1 tensor is not in the model: output_layer\.weight"
    ):
        find_weights(tmp_path / "out", CASES["llama, tied"])
    with pytest.raises(WorkloadError, match=r"unknown model of Megatron-LM 'mixtral'.* Known: gpt2, llama\."):
        find_weights(tmp_path / "out", architecture("mixtral"))
    adapted = architecture("llama", lora="r=2")
    with pytest.raises(WorkloadError, match="Megatron-LM keeps no adapters beside weights: merge them first"):
        write_megatron(weights_of(filled(adapted)), adapted, tmp_path / "adapted")


def test_other_formats_of_megatron_are_refused_with_advice(tmp_path):
    made = CASES["llama"]
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"x")
    with pytest.raises(
        WorkloadError, match="Megatron-LM's old format, which is a pickle; convert it there: --ckpt-convert"
    ):
        find_weights(tmp_path, made)
    write_megatron(weights_of(filled(made)), made, tmp_path / "zarr")
    (tmp_path / "zarr" / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(WorkloadError, match=r"is stored as 'zarr'; redline reads 'torch_dist'"):
        find_weights(tmp_path / "zarr", made)
