import json
import socket
import time
from dataclasses import replace

import pytest
import torch
from redline.base import gpus
from redline.base.errors import WorkloadError
from redline.models import workload
from redline.models.spaces import default_space

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 64}
BERT = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 300}  # fmt: skip


def test_a_folder_and_its_config_json_are_the_same_workload(folder):
    path = folder("my-model", **GPT2, architectures=["GPT2LMHeadModel"], dtype="bfloat16", transformers_version="9")
    of_folder, of_file = workload(str(path)), workload(path / "config.json")
    assert of_folder.id == of_file.id
    assert of_folder.name == of_file.name == "my-model"
    assert of_folder.spec == str(path)
    assert (of_folder.seq_len, of_folder.global_batch) == (64, 32)
    with torch.device("meta"):
        assert {each.dtype for each in of_folder.build_model().parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("architectures", "task"),
    [(["BertForMaskedLM"], "masked"), (["BertForPreTraining"], "pretraining"), (["BertLMHeadModel"], "causal"),
     (["BertForSequenceClassification"], "sequence_classification"), (None, "masked")],
)  # fmt: skip
def test_the_task_is_that_of_the_named_class(folder, architectures, task):
    made = workload(folder(**BERT, architectures=architectures))
    assert made.model.task == task
    assert type(made.build_model()).__name__ == (architectures or ["BertForMaskedLM"])[0]


def test_a_family_without_a_schedule_of_its_own_is_scheduled_by_what_repeats(folder, cpu):
    path = folder(model_type="gpt_neox", num_hidden_layers=3, hidden_size=32, num_attention_heads=2,
                  intermediate_size=64, vocab_size=300)  # fmt: skip
    space = default_space(workload(path, seq_len=16), cpu)
    assert space["checkpoint_ratio"].values == (0.0, 0.25, 0.75, 1.0)
    assert "of the 3 repeated blocks" in space["checkpoint_ratio"].help


@pytest.mark.parametrize(
    ("name", "limit"), [("gpt2", 1024), ("bert-base", 512), ("roberta-large", 512), ("opt-350m", 2048)]
)
def test_a_sequence_longer_than_the_positions_is_refused(name, limit):
    assert workload(name, seq_len=limit).seq_len == limit
    with pytest.raises(WorkloadError, match=f"seq_len must be at most {limit}.*got {limit + 1}"):
        workload(name, seq_len=limit + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "gpt2",}', r"config\.json:1:\d+ is not valid JSON"),
        ("[1]", "has no model_type"),
        ('{"hidden_size": 3}', "has no model_type"),
        ('{"model_type": "gpt22"}', "unknown model type 'gpt22'; did you mean 'gpt2'"),
        ('{"model_type": "clap"}', "no class of type 'clap' with a supported task"),
        ('{"model_type": "gpt2", "n_head": 5, "n_embd": 32}', "gpt2.*divisible"),
        ('{"model_type": "gpt2", "vocab_size": 0}', "vocab_size of at least 2, but has 0"),
        ('{"model_type": "gpt2", "vocab_size": "many"}', "gpt2"),
        ('{"model_type": "gpt2", "n_layer": -1, "n_positions": -4}', "gpt2"),
    ],
)
def test_a_bad_configuration_is_refused_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WorkloadError, match=message):
        workload(tmp_path)


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(WorkloadError, match="unknown model 'gpt2-tinny'; did you mean 'gpt2-tiny'"):
        workload("gpt2-tinny")
    with pytest.raises(WorkloadError, match="unknown model ''"):
        workload("")


def test_code_that_comes_with_a_model_is_never_run(folder):
    path = folder(model_type="mine", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (path / "evil.py").write_text("open(__file__ + '.ran', 'w')\n")
    with pytest.raises(WorkloadError, match="code that comes with a model is not run"):
        workload(path)
    assert not (path / "evil.py.ran").exists()
    # A known type with a map of its own is built by transformers' own code.
    assert workload(folder(**GPT2, auto_map={"AutoModelForCausalLM": "evil.Model"})).model.model_type == "gpt2"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return constants


def test_without_a_network_a_hub_id_fails_at_once_and_says_so(hub, monkeypatch):
    def waits(seconds):
        raise AssertionError(f"tries again after {seconds} s")

    monkeypatch.setattr(time, "sleep", waits)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(WorkloadError, match=r"'owner/no-such-model' .*127\.0\.0\.1 cannot be reached.*give a folder"):
        workload("owner/no-such-model")


def test_when_offline_is_asked_for_no_connection_is_tried(hub, monkeypatch):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(WorkloadError, match="HF_HUB_OFFLINE"):
        workload("owner/no-such-model")


def test_a_hub_id_in_the_local_cache_needs_no_network(hub, monkeypatch, tmp_path):
    # The layout of the hub's cache: refs name a commit, snapshots contain its files.
    root = tmp_path / "models--owner--cached"
    commit = "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots" / commit).mkdir(parents=True)
    (root / "snapshots" / commit / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", None)
    made = workload("owner/cached")
    assert (made.name, made.spec, made.seq_len) == ("cached", "owner/cached", 64)


def test_attentions_are_those_of_the_architecture_and_the_device(small, cpu, cuda, monkeypatch):
    assert small("gpt2").model.attentions(cpu) == ("sdpa", "eager")
    assert workload("gpt-neo-1.3b").model.attentions(cpu) == ("eager",)
    assert small("llama").model.attentions(cuda()) == ("sdpa", "eager")
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "flash_attn" else found(name))
    assert small("llama").model.attentions(cuda()) == ("sdpa", "eager", "flash_attention_2")
    assert small("llama").model.attentions(cuda((7, 5))) == ("sdpa", "eager")
    assert small("llama").model.attentions(cpu) == ("sdpa", "eager")


def test_importing_a_models_class_does_not_initialise_cuda(monkeypatch):
    """transformers imports torchao with it, which asks for the capability of the GPU."""
    import transformers
    from torch._dynamo.device_interface import CudaInterface

    class Asks(dict):
        def __missing__(self, key):
            return CudaInterface.Worker.get_device_properties().major

    architecture = workload("llama-tiny").model
    found = [gpus.Gpu(name="0", model="NVIDIA H200", memory_mib=143771, capability=(9, 0))]
    monkeypatch.setattr(gpus, "find_gpus", lambda: found)
    monkeypatch.setattr(transformers, "MODEL_FOR_CAUSAL_LM_MAPPING", Asks())
    assert replace(architecture).model_class == 9
