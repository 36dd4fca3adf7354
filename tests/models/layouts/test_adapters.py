"""Adapters in peft's format: read, written, merged, and refused if they belong to another model."""

import json

import pytest
import torch
from checkpoints import architecture, differing, filled, saved, weights_of
from redline.base._transformers import quiet
from redline.base.errors import WorkloadError
from redline.models.layouts.adapters import merged, write_peft
from redline.models.layouts.hugging_face import find_weights, plain, write_hugging_face

peft = pytest.importorskip("peft")

CASES = [
    ("llama", "r=4,alpha=10"),
    ("llama", "r=2,target=all-linear"),
    ("gpt2", "r=3"),
    ("bert", "r=4,target=query+dense"),
    ("t5", "r=2,target=q+v+wo"),
]


def folders(family, lora, tmp_path):
    """Writes folders of a model's base and of its adapters; returns the architecture and the model."""
    made = architecture(family, lora=lora)
    model = filled(made)
    base = filled(plain(made))
    own = {name.replace(".base_layer.", "."): each for name, each in model.state_dict().items() if "lora_" not in name}
    base.load_state_dict(own)
    saved(base, tmp_path / "base")
    write_peft(weights_of(model), made, tmp_path / "adapters", base=str(tmp_path / "base"))
    return made, model


def logits(model):
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_peft_computes_what_the_model_did(family, lora, tmp_path):
    made, model = folders(family, lora, tmp_path)
    with quiet():
        base = type(model).from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert torch.equal(logits(theirs), logits(model))
    assert not torch.equal(logits(filled(plain(made))), logits(model))


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_merging_equals_peft_s_and_gives_a_plain_model(family, lora, tmp_path):
    made, model = folders(family, lora, tmp_path)
    write_hugging_face(merged(weights_of(model), made), made, tmp_path / "merged")
    with quiet():
        ours = type(model).from_pretrained(tmp_path / "merged")
        base = type(model).from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    for name, each in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], each, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_base_and_adapters_come_back_by_the_model_s_names(family, lora, tmp_path):
    made, model = folders(family, lora, tmp_path)
    assert differing(find_weights(tmp_path / "base", made, tmp_path / "adapters"), model) == []
    assert differing(find_weights(tmp_path / "adapters", made), model) == []
    alone = find_weights(tmp_path / "base", made)
    missing = differing(alone, model)
    assert missing and all("lora_" in name for name in missing)
    assert set(missing).isdisjoint(alone.tensors)


def test_adapters_saved_by_peft_are_read(tmp_path):
    made = architecture("llama", lora="r=4,alpha=8,target=q_proj+v_proj")
    base = filled(plain(made))
    saved(base, tmp_path / "base")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path / "adapters")
    weights = find_weights(tmp_path / "base", made, tmp_path / "adapters")
    model = filled(made)
    model.load_state_dict({name: weights.tensors[name].read() for name in weights.tensors})
    assert torch.equal(logits(model), logits(theirs))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("r=8", r"adapters of r=4, alpha=10, and the model has r=8, alpha=8: give lora='r=4,alpha=10'"),
        ("r=4", r"adapters of r=4, alpha=10, and the model has r=4, alpha=4"),
        ("r=4,alpha=10,target=q_proj", r"4 tensors are not in the model: model\.layers\.0\.self_attn\.v_proj\.lora_A"),
        (
            "r=4,alpha=10,target=q_proj+v_proj+o_proj",
            r"4 tensors are missing: model\.layers\.0\.self_attn\.o_proj\.lora_A",
        ),
    ],
)
def test_adapters_of_another_model_are_refused_by_what_differs(lora, message, tmp_path):
    folders("llama", "r=4,alpha=10,target=q_proj+v_proj", tmp_path)
    with pytest.raises(WorkloadError, match=message):
        find_weights(tmp_path / "base", architecture("llama", lora=lora), tmp_path / "adapters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "adapters with peft_type IA3; redline trains plain LoRA"),
        ({"use_dora": True}, "adapters with use_dora"),
        ({"use_rslora": True}, "adapters with use_rslora"),
        ({"rank_pattern": {"q_proj": 8}}, "adapters with rank_pattern"),
        ({"bias": "all"}, "adapters with bias=all"),
    ],
)
def test_adapters_of_another_kind_are_refused(change, message, tmp_path):
    made, _ = folders("llama", "r=4", tmp_path)
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(WorkloadError, match=message):
        find_weights(tmp_path / "base", made, tmp_path / "adapters")


def test_a_plain_model_takes_no_adapters_and_a_plain_folder_no_adapted_weights(tmp_path):
    made, model = folders("llama", "r=4", tmp_path)
    with pytest.raises(
        WorkloadError, match=r"this llama is trained without; give `lora` r=\.\.\., or merge them first"
    ):
        find_weights(tmp_path / "base", plain(made), tmp_path / "adapters")
    with pytest.raises(WorkloadError, match="have adapters beside them: merge them first, or write the adapters alone"):
        write_hugging_face(weights_of(model), made, tmp_path / "out")
    with pytest.raises(WorkloadError, match="this llama has no adapters to write; --to hf writes its weights"):
        write_peft(weights_of(filled(plain(made))), plain(made), tmp_path / "out")
