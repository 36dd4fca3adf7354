"""A training that starts from a Hugging Face checkpoint: its tokenizer, and the files it contributes to the export."""

import json
import shutil

import pytest
import torch
import yaml
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder
from safetensors.torch import load_file
from texts import TOPICS
from train_commands import ended, settings, trained, words

pytestmark = pytest.mark.timeout(900)
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 0}


def make_tokenizer(folder, size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(TOPICS[:10], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(here):
    """A checkpoint in bfloat16 as transformers saves it."""
    from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(here / "llama")).to(torch.bfloat16)
    model.generation_config = GenerationConfig(**GENERATION)
    model.save_pretrained(here / "begun")
    make_tokenizer(here / "begun", 295)
    assert ended(here, *trained("train", "llama", "went-on", "--from", "begun", "--lr", "1e-2", steps=2)) == 0
    return here / "begun"


def test_the_checkpoint_s_tokenizer_is_the_default(here, checkpoint):
    document = yaml.safe_load((here / "went-on" / "train.yaml").read_text())
    assert document["asked"]["tokenizer"] == document["data"]["tokenizer"] == str(checkpoint)
    assert document["data"]["tokens"] < 30_000, "of 40,000 bytes"


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_an_export_has_its_tokenizer_its_generation_settings_and_its_dtype(run, here, checkpoint, tmp_path, dtype):
    more = ("--dtype", dtype) if dtype else ()
    text = words(run("convert", "went-on", tmp_path / "hf", *more))
    rounded = ", stored in bfloat16, the precision of --from (--dtype float32 keeps all digits)"
    assert text == f"wrote {tmp_path / 'hf'}: step 2 of went-on, for hf{'' if dtype else rounded}"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (checkpoint / name).read_bytes()
    expected = torch.float32 if dtype else torch.bfloat16
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    held = dcp_tensors(CheckpointFolder(here / "went-on" / "checkpoints").all()[0].path)
    for name, weight in load_file(tmp_path / "hf" / "model.safetensors").items():
        assert torch.equal(weight, held[f"model/{name}"].read().to(expected)), name


def test_another_tokenizer_gets_a_note(run, here, checkpoint):
    make_tokenizer(here / "smaller", 280)
    shutil.copytree(checkpoint, here / "same")
    for name in ("smaller", "same"):
        text = words(run(*trained("train", "llama", f"with-{name}", "--from", "begun", "--tokenizer", name, steps=1)))
        assert ("has other files than the one in" in text) == (name == "smaller"), text


def test_text_by_bytes_needs_a_request_or_no_tokenizer(run, here, checkpoint, tmp_path):
    text = words(run(*trained("train", "llama", "by-bytes", "--from", "begun", "--tokenizer", "bytes", steps=1)))
    assert "note: text is read by bytes, as requested, but the weights were trained with the tokenizer in" in text
    assert "tokenizer bytes" in text
    words(run("convert", "by-bytes", tmp_path / "hf"))
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()).get("temperature") is None
    shutil.copytree(checkpoint, here / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    text = words(run(*trained("train", "llama", "of-bare", "--from", "bare", steps=1)))
    assert "bare' has no tokenizer and none is given: text is read by bytes" in text


def test_weights_that_are_not_trained_are_read_from_the_beginning_s_again(run, here, checkpoint, tmp_path):
    shutil.copytree(checkpoint, here / "base-of-adapters")
    lora = ("--from", "base-of-adapters", "--lora", "r=2", "--save-every", 2, "--lr", "1e-2")
    words(run(*trained("train", "llama", "adapters", *lora, steps=4)))
    (saved, _) = CheckpointFolder(here / "adapters" / "checkpoints").all()
    assert all(".lora_" in name for name in dcp_tensors(saved.path))
    words(run(*trained("train", "llama", "uninterrupted", *lora, steps=6)))
    text = words(run("train", "adapters", "--resume", "--steps", 6, *settings(here, lr_steps=6)))
    assert "continuing from step-00000004" in text
    words(run("convert", "adapters", tmp_path / "hf", "--merge"))
    base, merged = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "hf"))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all("proj" in name for name in changed)
    shutil.rmtree(here / "base-of-adapters")
    for command in (("train", "adapters", "--resume", "--steps", 7), ("convert", "adapters", "merged", "--merge")):
        code, _, err = run(*command)
        assert code != 0 and "base-of-adapters" in err
    words(run("convert", "adapters", tmp_path / "peft", "--to", "peft"))
