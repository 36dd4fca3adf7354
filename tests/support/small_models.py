"""Fixtures: small models without dropout, and devices to declare spaces on."""

import json

import pytest
from redline.base.device import Device
from redline.models.architecture import Architecture
from redline.models.huggingface import hugging_face_workload

SMALL = {
    "gpt2": {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "bos_token_id": None, "eos_token_id": None},
    "bert": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
             "vocab_size": 300, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0},
    "llama": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 64, "bos_token_id": None,
              "eos_token_id": None},
}  # fmt: skip


@pytest.fixture(scope="session")
def small():
    """Returns a function that makes a small workload without dropout: `small("gpt2", seq_len=16, global_batch=8,
    n_layer=2)`."""

    def make(model_type="gpt2", seq_len=16, global_batch=8, **changed):
        task = "masked" if model_type == "bert" else "causal"
        return hugging_face_workload(
            Architecture(model_type=model_type, arguments={**SMALL[model_type], **changed}, task=task),
            name=f"small-{model_type}",
            spec=f"small-{model_type}",
            seq_len=seq_len,
            global_batch=global_batch,
        )

    return make


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a Hugging Face model's folder with a config.json."""

    def make(name="model", **values):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(values))
        return path

    return make


@pytest.fixture
def cpu():
    return Device(type="cpu", name="a CPU", count=1, memory_mib=8192)


@pytest.fixture
def cuda():
    def make(capability=(9, 0), count=1):
        return Device(type="cuda", name="a GPU", count=count, memory_mib=81920, capability=capability)

    return make
