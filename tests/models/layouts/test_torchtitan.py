"""torchtitan's checkpoints of Llama, compared with its own model and its own adapter of state dicts."""

import pytest
import torch
from checkpoints import architecture, differing, filled, weights_of
from redline.base.errors import WorkloadError
from redline.models.layouts.dcp import dcp_tensors
from redline.models.layouts.find import find_weights
from redline.models.layouts.torchtitan import write_torchtitan
from tiers import tiered
from torch.distributed import checkpoint


def its_model(made, fused):
    """Returns torchtitan's model of the same sizes, and its configuration."""
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton")
    from torchtitan.models import llama3

    ours = made.configuration()
    settings = llama3.Llama3Model.Config(
        dim=32,
        vocab_size=97,
        enable_weight_tying=ours.tie_word_embeddings,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=97, embedding_dim=32),
        norm=llama3.RMSNorm.Config(normalized_shape=32, eps=ours.rms_norm_eps),
        lm_head=llama3.Linear.Config(in_features=32, out_features=97),
        layers=llama3._build_llama3_layers(
            fuse_qkv=fused, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, hidden_dim=64, attn_backend="flex",
            rope=llama3.ComplexRoPE.Config(dim=8, max_seq_len=40, theta=10000, scaling="none"),
        ),
    )  # fmt: skip
    for each in settings.layers:
        each.attention_norm.eps = each.ffn_norm.eps = ours.rms_norm_eps
    return settings.build().eval(), settings


@pytest.mark.parametrize(("tied", "fused"), tiered([(True, True)], [(False, False), (False, True), (True, False)]))
def test_torchtitan_computes_what_the_model_does_and_is_read_back(tied, fused, tmp_path):
    made = architecture("llama", tie_word_embeddings=tied)
    model = filled(made)
    theirs, settings = its_model(made, fused)
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.llama3 import Llama3StateDictAdapter

    write_torchtitan(weights_of(model), made, tmp_path / "ours")
    state = theirs.state_dict()
    assert set(state) - set(dcp_tensors(tmp_path / "ours")) == set()
    checkpoint.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    theirs.load_state_dict(state)
    turned = Llama3StateDictAdapter(settings, None).to_hf(dict(theirs.state_dict()))
    own = model.state_dict()
    assert set(own) - set(turned) == ({"lm_head.weight"} if tied else set())
    assert [name for name, each in turned.items() if not torch.equal(each, own[name])] == []

    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
    with torch.no_grad():
        found = theirs(ids, positions=torch.arange(16)[None].expand(2, -1), attention_masks=mask)
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)

    checkpoint.save(theirs.state_dict(), checkpoint_id=tmp_path / "theirs" / "step-9", no_dist=True)
    checkpoint.save({"step": 1}, checkpoint_id=tmp_path / "theirs" / "step-10", no_dist=True)
    (tmp_path / "theirs" / "step-10" / ".metadata").unlink()  # as if the save had been killed
    assert differing(find_weights(tmp_path / "theirs", made), model) == []


def test_rows_of_queries_and_keys_are_in_the_order_of_neighbouring_pairs(tmp_path):
    """Entry j d/2 + i of a head becomes 2i + j in torchtitan; the test spells this out."""
    made = architecture("llama")
    model = filled(made)
    write_torchtitan(weights_of(model), made, tmp_path / "out")
    stored = dcp_tensors(tmp_path / "out")
    for name, heads in (("q", 4), ("k", 2)):
        here = model.state_dict()[f"model.layers.1.self_attn.{name}_proj.weight"]
        there = stored[f"layers.1.attention.qkv_linear.w{name}.weight"].read()
        for head in range(heads):
            for i in range(4):
                for j in range(2):
                    assert torch.equal(there[head * 8 + 2 * i + j], here[head * 8 + j * 4 + i])
    assert torch.equal(stored["layers.0.feed_forward.w3.weight"].read(), model.model.layers[0].mlp.up_proj.weight)


def test_names_of_earlier_releases_are_read(tmp_path):
    made = architecture("llama")
    model = filled(made)
    write_torchtitan(weights_of(model), made, tmp_path / "out")
    old = {
        name.replace(".qkv_linear.", ".").replace("lm_head.", "output."): each.read()
        for name, each in dcp_tensors(tmp_path / "out").items()
    }
    assert "layers.0.attention.wq.weight" in old and "output.weight" in old
    checkpoint.save(old, checkpoint_id=tmp_path / "old", no_dist=True)
    assert differing(find_weights(tmp_path / "old", made), model) == []


def test_another_model_is_refused_by_torchtitan_s_names(tmp_path):
    made = architecture("llama")
    write_torchtitan(weights_of(filled(made)), made, tmp_path / "out")
    with pytest.raises(WorkloadError, match=r"by torchtitan's names: 9 tensors are missing: layers\.2\.attention\."):
        find_weights(tmp_path / "out", architecture("llama", num_hidden_layers=3))
    message = (
        r"4 tensors have another shape: layers\.0\.attention\.qkv_linear\.wk\.weight with \(16, 32\) there, \(32, 32\)"
    )
    with pytest.raises(WorkloadError, match=message):
        find_weights(tmp_path / "out", architecture("llama", num_key_value_heads=4))
    with pytest.raises(WorkloadError, match="unknown model of torchtitan 'gpt2'.* Known: llama"):
        write_torchtitan(weights_of(filled(architecture("gpt2"))), architecture("gpt2"), tmp_path / "gpt2")
    with pytest.raises(
        WorkloadError, match=r"torchtitan's Llama has no biases, and this llama has \(attention_bias=true\)"
    ):
        write_torchtitan(weights_of(filled(made)), architecture("llama", attention_bias=True), tmp_path / "biased")
