"""Settings of a command's own training, read from trainers' argument names in its words and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from redline.runners.command.command import Command, ServerCommand
from redline.runners.command.trained import CommandTraining


def read(command):
    """What a command trains, without its knobs."""
    return replace(CommandTraining.by(command), knobs={})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py", CommandTraining()),
        ("train --model_name_or_path gpt2 --block_size 512 --bf16", CommandTraining(model="gpt2", seq_len=512, precision="bf16")),
        ("python train.py --model-name-or-path=gpt2 --bf16 False --fp16 true", CommandTraining(model="gpt2", precision="fp16")),
        ("torchrun pretrain_gpt.py --bf16 --seq-length 4096", CommandTraining(seq_len=4096, precision="bf16")),
        ("accelerate launch --mixed_precision no train.py --model m", CommandTraining(model="m", precision="fp32")),
        ("python cli.py fit --trainer.max_steps 3 --precision bf16-true", CommandTraining(precision="bf16_pure")),
        (
            "llamafactory-cli train model_name_or_path=m cutoff_len=64 fp16=true",
            CommandTraining(model="m", seq_len=64, precision="fp16"),
        ),
        ("python train.py --model {size} --seq_len {length} --config_name c.json", CommandTraining(model="c.json")),
        ("python train.py --block_size many --model", CommandTraining()),
        (["python", "train.py", "--model", "two words"], CommandTraining(model="two words")),
        ("python 'train.py", CommandTraining()),
    ],
)  # fmt: skip
def test_settings_are_read_from_the_command_s_arguments(command, expected):
    assert read(Command(command=command)) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size {micro_batch} --global-batch-size 16 --bf16",
            CommandTraining(global_batch=16, precision="bf16"),
        ),
        (
            "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 16",
            CommandTraining(global_batch=16, split=4),
        ),
        (
            "torchrun pretrain_gpt.py --tensor-model-parallel-size {tp} --global-batch-size {micro_batch * 16} --fp16",
            CommandTraining(precision="fp16"),
        ),
        (
            "torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.global_batch_size 32",
            CommandTraining(model="llama3-8b", global_batch=32, seq_len=8192),
        ),
        (
            "litgpt pretrain --train.global_batch_size 64 --train.max_seq_length 1024 --precision bf16-mixed",
            CommandTraining(global_batch=64, seq_len=1024, precision="bf16"),
        ),
        (
            "python run_clm.py --model_name_or_path weights --config_name sizes --per_device_train_batch_size 2",
            CommandTraining(model="sizes"),
        ),
        ("python train.py --block_size 512 text.txt --model m more", CommandTraining(model="m", seq_len=512)),
    ],
)
def test_a_command_of_a_known_framework_is_read_as_redline_check_reads_it(command, expected):
    assert read(Command(command=command)) == expected


def test_files_of_a_known_framework_give_its_batch_and_formats_unless_files_may_not_be_read():
    Path("ds.json").write_text(json.dumps({"train_batch_size": 32, "bf16": {"enabled": True}}))
    command = "deepspeed run_clm.py --deepspeed ds.json --model_name_or_path gpt2"
    assert read(Command(command=command)) == CommandTraining(model="gpt2", global_batch=32, precision="bf16")
    assert CommandTraining.by(ServerCommand(command=command)).global_batch is None
    Path("run.toml").write_text("[training]\nglobal_batch_size = 32\n")
    titan = "torchrun -m torchtitan.train --job.config_file run.toml"
    assert CommandTraining.by(Command(command=titan)).global_batch == 32
    assert CommandTraining.by(Command(command=f"{titan} --training.global_batch_size {{x}}")).global_batch is None
    megatron = CommandTraining.by(Command(command="torchrun pretrain_gpt.py unknown.yaml --global-batch-size 16"))
    assert megatron.global_batch == 16, "a file of another kind does not hide the command"


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b", "llama3-8b"),
        ("python pretrain.py --factory llama3_8b", "llama3-8b"),
        ("python pretrain.py --factory llama9_8b", None),
        ("train --config conf.yaml", None),
    ],
)
def test_a_recipe_may_have_the_name_of_a_preset(command, model):
    assert CommandTraining.by(Command(command=command)).model == model


@pytest.mark.parametrize("text", [b"\xff\x00", b"- 1\n- 2\n", b"a: [", b"&a [*a, *a]"])
def test_a_file_that_says_nothing_is_passed_over(text):
    Path("a.yaml").write_bytes(text)
    assert read(Command(command="train a.yaml missing.yaml --model gpt2")) == CommandTraining(model="gpt2")
