"""Errors of `redline train` and `redline convert` name the given value, the rule and the fix."""

import json

import pytest
import torch
from train_commands import SIZES, ended, settings, trained

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def finished(here):
    """A finished training of six steps."""
    assert ended(here, *trained("train", "llama", "finished", *settings(here, clip=0.9), steps=6)) == 0
    return "finished"


def refused(run, messages, *arguments, expected=2):
    code, out, err = run(*arguments)
    text = " ".join((out + err).split())
    assert code == expected, text
    assert all(each in text for each in messages), text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (b"", (), ["has no token: its texts are empty"]),
        (b"caf\xe9 au lait " * 50, (), ["'utf-8' codec can't decode byte 0xe9"]),
        (b"short", (), ["is too short: a sample has 16 tokens, but the data has", "a smaller sequence length"]),
        (b"one sample alone " * 1, ("--held-out", "0.5"), ["so none can be held out"]),
        (
            b"some more text here " * 10,
            ("--held-out", "0.1", "--eval-every", "5"),
            ["are held out; give a larger --held-out"],
        ),
        (None, (), ["no-such.txt"]),
    ],
    ids=["empty", "not UTF-8", "too short", "none to hold out", "too few held out", "not there"],
)
def test_unusable_data_is_refused(run, here, tmp_path, content, more, message):
    path = here / "given.txt" if content is not None else here / "no-such.txt"
    if content is not None:
        path.write_bytes(content)
    refused(run, message, "train", "llama", "--data", path, *SIZES, "--devices", 1, *more, "--out", tmp_path / "out")
    assert not list(tmp_path.rglob("step-*"))


def test_ranks_of_a_launcher_are_refused(run, monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    message = ["redline train starts its ranks itself: leave the launcher out", "--runner ray", "--to python"]
    refused(run, message, "train", "llama", *SIZES, "--out", tmp_path / "out")


def test_a_small_vocabulary_is_refused(run, here, tmp_path):
    small = json.loads((here / "llama" / "config.json").read_text()) | {"vocab_size": 100}
    (here / "narrow").mkdir(exist_ok=True)
    (here / "narrow" / "config.json").write_text(json.dumps(small))
    message = ["text by bytes needs a vocabulary of at least 25", "but the model has 100; give a tokenizer"]
    refused(run, message, "train", "narrow", "--data", "corpus.txt", *SIZES, "--devices", 1, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--lr", "0.5"), ["has lr=the default, and cannot continue with 0.5", "start another one for that"]),
        (("--data", "work.py"), ["corpus.txt'], and cannot continue with ['/", "/work.py']"]),
        (("--global-batch", "16"), ["has global_batch=8, and cannot continue with 16"]),
        ({"clip": 0.5}, ["has clip=0.9, and cannot continue with 0.5"]),
        ({"log_every": 0}, ["log_every must be a whole number of at least 1, but got 0"]),
        ({"shuffle": "never"}, ["the settings in ", "shuffle cannot be 'never'; its default is True"]),
        ({"betas": 0.9}, ["the settings in ", "betas cannot be 0.9; its default is (0.9, 0.999)"]),
        ({"tokenizer": 3}, ["the settings in ", "tokenizer cannot be 3; its default is None"]),
        ({"warmpu": 3}, ["the settings in ", "unknown setting 'warmpu'; did you mean 'warmup'?"]),
        (("--devices", "0"), ["devices must be a whole number of at least 1, but got 0"]),
    ],
    ids=str,
)
def test_a_training_does_not_resume_with_other_hyperparameters(run, here, finished, more, message):
    refused(run, message, "train", finished, "--resume", *(settings(here, **more) if isinstance(more, dict) else more))


def test_a_start_that_is_refused_leaves_no_folder_and_takes_none_away(run, here, tmp_path):
    arguments = (
        "train",
        "llama",
        "--data",
        "corpus.txt",
        *SIZES,
        "--devices",
        1,
        "--held-out",
        "0.001",
        "--eval-every",
        5,
    )
    refused(run, ["are held out; give a larger --held-out"], *arguments, "--out", tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(run, ["are held out; give a larger --held-out"], *arguments, "--out", tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").exists()
    (tmp_path / "mine" / "checkpoints").mkdir()
    (tmp_path / "mine" / "checkpoints" / "epoch=1.ckpt").write_text("mine")
    refused(run, ["contains epoch=1.ckpt and no checkpoint"], *arguments, "--out", tmp_path / "mine")


def test_changed_data_is_refused(run, here, finished):
    before = (here / "corpus.txt").read_text()
    try:
        (here / "corpus.txt").write_text(before[1:])
        refused(
            run,
            ["the data differs from that of the training in 'finished'"],
            "train",
            finished,
            "--resume",
            "--steps",
            7,
        )
    finally:
        (here / "corpus.txt").write_text(before)


def test_runs_without_a_winner_are_refused(run, here, tmp_path):
    (tmp_path / "best.yaml").write_text("best: null\nwhy: every trial ran out of memory\n")
    message = ["names no winner: every trial ran out of memory"]
    refused(run, message, "train", tmp_path / "best.yaml", expected=3)
    (tmp_path / "best.yaml").write_text(
        "best: {configuration: {micro_batch: 1}, throughput: 3.0}\ntrains: {workload: {command: python x.py}}\n"
    )
    refused(run, ["is of a command; redline trains models"], "train", tmp_path / "best.yaml")
    (tmp_path / "best.yaml").write_text("- 1\n")
    refused(run, ["best.yaml' is damaged: it must be a mapping"], "train", tmp_path / "best.yaml")
    (tmp_path / "best.yaml").write_text("tp: 1\n")
    refused(run, ["is neither a best.yaml of redline nor a plan of"], "train", tmp_path / "best.yaml")


def test_a_learning_rate_for_an_optimizer_of_its_own_is_refused(run, here, tmp_path):
    (here / "own.py").write_text(
        "import sys; sys.path.insert(0, '.')\nimport torch\nfrom dataclasses import replace\nfrom work import net\n"
        "own = replace(net, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))\n"
    )
    message = ["has its own optimizer, whose learning rate --lr does not set"]
    refused(run, message, "train", "own.py:own", "--lr", "0.1", "--out", tmp_path / "out")


# -- convert -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--to", "hff"), ["unknown layout 'hff'; did you mean 'hf'?"]),
        (("--to", "megatron"), ["megatron was removed: convert with --to hf; Megatron-Bridge imports that folder"]),
        (("--dtype", "fp8"), ["unknown dtype 'fp8'"]),
        (
            ("--to", "peft", "--dtype", "bfloat16"),
            ["--dtype is for a Hugging Face checkpoint, and has no effect on peft"],
        ),
        (("--step", 5), ["'finished' has no checkpoint of step 5; there are: 6"]),
        (("--merge",), ["'finished' has no adapters; it trains all weights"]),
        (("--to", "peft"), ["'finished' has no adapters; it trains all weights"]),
        (
            ("--to", "peft", "--merge"),
            ["--merge makes plain weights, but peft's checkpoints contain adapters; give --to hf"],
        ),
    ],
    ids=str,
)
def test_impossible_conversions_are_refused(run, here, finished, more, message):
    refused(run, message, "convert", finished, "nowhere", *more)
    assert not (here / "nowhere").exists()


@pytest.mark.parametrize("more", [(), ("--dtype", "bfloat16")], ids=str)
def test_a_checkpoint_becomes_a_folder_that_transformers_loads_bit_for_bit(run, here, finished, tmp_path, more):
    from redline.models.layouts.dcp import dcp_tensors
    from redline.trainer.checkpoint.saver import CheckpointFolder
    from transformers import AutoModelForCausalLM

    code, out, err = run("convert", finished, tmp_path / "hf", *more)
    assert code == 0, out + err
    dtype = torch.bfloat16 if "--dtype" in more else torch.float32
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype)
    held = dcp_tensors(CheckpointFolder(here / finished / "checkpoints").all()[0].path)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, held[f"model/{name}"].read().to(dtype)), name
    found = model.generate(torch.tensor([[72, 101, 108]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert found.shape == (1, 7)


def test_a_damaged_checkpoint_is_not_converted(run, here, finished, tmp_path):
    (path,) = (here / finished / "checkpoints").iterdir()
    data = (path / "__0_0.distcp").read_bytes()
    try:
        (path / "__0_0.distcp").write_bytes(data[:-1])
        refused(run, ["is damaged: it has", "bytes, and had"], "convert", finished, tmp_path / "hf")
    finally:
        (path / "__0_0.distcp").write_bytes(data)
