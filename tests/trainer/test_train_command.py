"""`redline train` and `redline convert` on the command line: their output, the trained weights and the converted files."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.convert import LAYOUTS
from train_commands import GPT2, ended, settings, trained

pytestmark = pytest.mark.timeout(900)
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, resource.RLIM_INFINITY))
os.execv(sys.executable, [sys.executable, "-m", "redline.cli", *sys.argv[1:]])
"""


@pytest.fixture(scope="session")
def base(here):
    """The folder of a Llama in Hugging Face's form, written by a training of all weights."""
    assert ended(here, *trained("train", "llama", "base-trained", steps=2)) == 0
    assert ended(here, "convert", "base-trained", "base") == 0
    return here / "base"


@pytest.fixture(scope="session")
def adapted(here, base):
    """A training of adapters that starts from `base`."""
    more = ("--from", "base", "--lora", "r=4", "--lr", "1e-2")
    assert ended(here, *trained("train", "llama", "adapted", *more, steps=4)) == 0
    return "adapted"


def latest(folder):
    """The tensors of a training's latest checkpoint."""
    checkpoint = CheckpointFolder(folder / "checkpoints").all()[0]
    return {name: tensor.read() for name, tensor in dcp_tensors(checkpoint.path).items()}


def test_with_json_one_object_is_printed_and_nothing_else(run, here):
    code, out, err = run(*trained("train", "llama", "told", "--json", steps=4))
    assert code == 0 and err == ""
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert found.keys() == {"folder", "step", "stopped", "strategies", "measurement", "predicted"}
    assert (found["folder"], found["step"], found["stopped"], found["predicted"]) == ("told", 4, False, None)
    (strategy,) = found["strategies"]
    document = yaml.safe_load((here / "told" / "train.yaml").read_text())
    assert strategy == document["strategies"][0] and strategy["configuration"]["precision"] == "fp32"
    measured = found["measurement"]
    assert measured["status"] == "ok" and measured["unit"] == "tokens/s" and measured["throughput"] > 0
    assert measured["throughput"] == pytest.approx(8 * 16 * 1e3 / measured["step_ms"])


# -- conversion ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gpt2_becomes_a_folder_that_transformers_loads_bit_for_bit(run, here, tmp_path, monkeypatch):
    """GPT-2's matrices are transposed relative to linear layers', and its head is its embedding."""
    from transformers import AutoModelForCausalLM

    code, out, err = run(*trained("train", "./gpt2", "trained-gpt2", "--lr", "1e-2", steps=4))
    assert code == 0, out + err
    code, out, err = run("convert", "trained-gpt2", tmp_path / "hf")
    assert code == 0, out + err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    held = latest(here / "trained-gpt2")
    names = {name for name, _ in model.named_parameters()}
    assert names == {each.removeprefix("model/") for each in held if each.startswith("model/")} - {"lm_head.weight"}
    for name, weight in model.named_parameters():
        if ".lora_" in name:  # the others are those of --from
            assert torch.equal(weight, held[f"model/{name}"]), name
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.resid_pdrop == GPT2["resid_pdrop"] and model.config.vocab_size == 300
    found = model.generate(torch.tensor([[72, 101, 108]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert found.shape == (1, 7)

    # While the training goes on, it removes old checkpoints.
    copy, write = shutil.copytree(here / "trained-gpt2", tmp_path / "copy"), LAYOUTS["hf"]

    def removed(*args, **options):
        shutil.rmtree(CheckpointFolder(copy / "checkpoints").all()[-1].path)
        write(*args, **options)

    monkeypatch.setitem(LAYOUTS, "hf", removed)
    code, _, err = run("convert", copy, tmp_path / "late")
    assert code != 0 and "the training has removed 'step-00000004' meanwhile: convert its latest checkpoint" in err


@pytest.mark.slow
def test_adapters_convert_to_peft_and_merge_to_equal_outputs(run, here, base, adapted, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    code, out, err = run("convert", adapted, tmp_path / "peft", "--to", "peft")
    assert code == 0, out + err
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    held = latest(here / adapted)
    trained_too = 0
    for name, weight in model.named_parameters():
        name = name.removeprefix("base_model.model.")
        if ".lora_" in name:  # the others are those of --from
            assert torch.equal(weight, held[f"model/{name}"]), name
        trained_too += ".lora_B." in name and bool(weight.any())
    assert trained_too == 4, "q and v of both blocks"
    code, out, err = run("convert", adapted, tmp_path / "hf", "--merge")
    assert code == 0, out + err
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = model.merge_and_unload().state_dict()
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    # Without either option the error lists both.
    code, out, err = run("convert", adapted, tmp_path / "neither")
    assert code == 2 and "trains adapters: give --to peft, or --merge for a whole model" in " ".join(err.split())


# -- how it ends ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_whose_last_step_cannot_be_saved_has_failed_and_says_so(start, here):
    """No file may exceed 250 kB: a checkpoint does, the data's and a log do not."""
    launcher = [sys.executable, "-c", LIMITED]
    arguments = trained("train", "llama", "unsaved", "--save-every", 2, steps=4)
    code, text = start(*arguments, launcher=launcher).wait()
    text = " ".join(text.split())
    assert code == 1, text
    assert "THE CHECKPOINT OF STEP 2 WAS NOT SAVED: OSError: [Errno 27] File too large" in text
    assert "the training reached step 4, which could not be saved: OSError: [Errno 27] File too large" in text
    assert "there is no checkpoint, and --resume starts from step 0" in text and "Traceback" not in text
    assert not list((here / "unsaved" / "checkpoints").iterdir())
    code, text = start("train", "unsaved", "--resume", *settings(here, keep=1), "--steps", 3).wait()
    assert code == 0, text
    code, text = start("train", "unsaved", "--resume", "--steps", 4, launcher=launcher).wait()
    text = " ".join(text.split())
    assert code == 1 and "the latest checkpoint is of step 3, and --resume continues from there" in text, text
    assert [each.name for each in (here / "unsaved" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(run, here, base):
    wider = json.loads((here / "llama" / "config.json").read_text()) | {"intermediate_size": 80, "num_hidden_layers": 3}
    (here / "wider").mkdir()
    (here / "wider" / "config.json").write_text(json.dumps(wider))
    code, out, err = run(*trained("train", "wider", "from-another", "--from", "base", steps=2))
    text = " ".join((out + err).split())
    assert code == 2, text
    assert "/base' is a checkpoint of another model than this llama (LlamaForCausalLM)." in text
    assert "9 tensors are missing: model.layers.2." in text
    assert "6 tensors have another shape: model.layers.0.mlp." in text
    assert "gate_proj.weight with (64, 32) there, (80, 32) in the model" in text
    assert "Give the model that it was saved from, or another checkpoint" in text and "Traceback" not in text
    code, out, err = run(*trained("train", "./gpt2", "from-another-family", "--from", "base", steps=2))
    text = " ".join((out + err).split())
    assert code == 2 and "transformer.h.0.attn.c_attn.weight" in text and "20 tensors are not in the model" in text, (
        text
    )
    assert not list(here.glob("from-another*/checkpoints/step-*"))
