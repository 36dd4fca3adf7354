"""The class that a configuration names is built, with inputs and the loss of its task, or refused with the workload to write."""

import math

import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models import workload
from redline.models.batches import ForwardPass, make_batch

_ENCODER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
            "vocab_size": 300, "max_position_embeddings": 16}  # fmt: skip
_BOTH = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 300,
         "max_position_embeddings": 16}  # fmt: skip
_T5 = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_kv": 16, "d_ff": 64, "vocab_size": 300}
_AUDIO = {**_ENCODER, "conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [80, 40],
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
_WHISPER = {**_BOTH, "num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 24, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
_CLIP = {"text_config": {**_ENCODER, "bos_token_id": 0, "eos_token_id": 2, "projection_dim": 16},
         "vision_config": {**_ENCODER, "image_size": 32, "patch_size": 8, "projection_dim": 16},
         "projection_dim": 16}  # fmt: skip
_SEGFORMER = {"image_size": 32, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4,
              "decoder_hidden_size": 8}  # fmt: skip
CLASSES = {
    "BertForSequenceClassification": ("bert", _ENCODER, math.log(2)),
    "BertForTokenClassification": ("bert", {**_ENCODER, "num_labels": 9}, math.log(9)),
    "BertForQuestionAnswering": ("bert", _ENCODER, math.log(16)),
    "BertForMultipleChoice": ("bert", _ENCODER, math.log(4)),
    "BertForPreTraining": ("bert", _ENCODER, math.log(300) + math.log(2)),
    "LlamaForSequenceClassification": ("llama", {**_ENCODER, "num_key_value_heads": 2}, math.log(2)),
    "BartForSequenceClassification": ("bart", _BOTH, math.log(3)),
    "T5ForQuestionAnswering": ("t5", _T5, math.log(16)),
    "BartForConditionalGeneration": ("bart", _BOTH, math.log(300)),
    "WhisperForConditionalGeneration": ("whisper", _WHISPER, math.log(300)),
    "WhisperForAudioClassification": ("whisper", _WHISPER, math.log(2)),
    "Wav2Vec2ForCTC": ("wav2vec2", _AUDIO, None),
    "CLIPModel": ("clip", _CLIP, None),
    "SiglipModel": ("siglip", _CLIP, None),
    "CLIPForImageClassification": ("clip", _CLIP, math.log(2)),
    "SegformerForSemanticSegmentation": ("segformer", _SEGFORMER, math.log(2)),
}
"""Family, configuration, and the loss of random guesses by the classes or tokens; None if it depends on more."""
_TEXTS = ("Bert", "Llama", "Bart", "T5", "CLIPModel", "Siglip")


@pytest.mark.parametrize("name", CLASSES)
def test_the_named_class_is_built_and_trains_on_its_task(folder, name):
    model_type, values, guessed = CLASSES[name]
    length = 16 if name.startswith(_TEXTS) else None
    made = workload(folder(model_type=model_type, architectures=[name], **values), seq_len=length)
    torch.manual_seed(0)
    model = made.build_model()
    assert type(model).__name__ == made.model.class_name == name
    loss = ForwardPass(made, model)(make_batch(made, 4, seed=0))
    loss.backward()
    assert math.isfinite(loss.item())
    assert guessed is None or loss.item() == pytest.approx(guessed, rel=0.35)
    unused = [key for key, param in model.named_parameters() if param.requires_grad and param.grad is None]
    # The mask's embedding is used by chance, and CLIP classifies images by the mean of its patches.
    usual = ("masked_spec_embed", "pooler", "post_layernorm")
    assert not [key for key in unused if not any(name in key for name in usual)]


def test_ctc_and_contrastive_losses_are_those_of_transformers(folder):
    """Each is computed here; transformers' own is in its models' forward."""
    made = workload(folder(model_type="clip", architectures=["CLIPModel"], **_CLIP), seq_len=16)
    model, batch = made.build_model().eval(), make_batch(made, 4, 0)
    assert ForwardPass(made, model)(batch).item() == pytest.approx(model(**batch, return_loss=True).loss.item())
    made = workload(folder(model_type="siglip", architectures=["SiglipModel"], **_CLIP), seq_len=16)
    model, batch = made.build_model().eval(), make_batch(made, 4, 0)
    assert ForwardPass(made, model)(batch).item() == pytest.approx(model(**batch, return_loss=True).loss.item())
    values = {**_AUDIO, "ctc_loss_reduction": "mean"}
    made = workload(folder(model_type="wav2vec2", architectures=["Wav2Vec2ForCTC"], **values))
    model, (audio, targets) = made.build_model().eval(), make_batch(made, 2, 0)
    ours = ForwardPass(made, model)((audio, targets)).item()
    assert ours == pytest.approx(model(audio, labels=targets).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "name", "why"),
    [
        ("bert", "BertModel", "without one of the supported tasks"),
        ("bert", "GPT2LMHeadModel", "those of bert: .*BertForSequenceClassification"),
        ("electra", "ElectraForPreTraining", "targets are made by code of its own"),
        ("llava", "LlavaForConditionalGeneration", "takes images with its text"),
        ("mask2former", "Mask2FormerForUniversalSegmentation", "without one of the supported tasks"),
    ],
)
def test_another_class_is_refused_with_the_workload_to_write(folder, model_type, name, why):
    values = _ENCODER if model_type in ("bert", "electra") else {}
    with pytest.raises(WorkloadError, match=why) as refusal:
        workload(folder(model_type=model_type, architectures=[name], **values))
    lines = str(refusal.value).splitlines()
    assert "    workload = rl.Workload(" in lines
    assert f"        model=lambda: {name}(config)," in lines
