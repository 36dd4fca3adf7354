"""Launchers: what is said to each is what its own parser takes, and what a command has already stays its own."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from redline.errors import UsageError
from redline.runners.command.command import Command
from redline.runners.command.launchers import LAUNCHERS, find_launcher
from redline.runners.command.work import Commands
from redline.space import Space
from without_triton import WITHOUT_TRITON


def space_of(name, devices=4, **more):
    space = Space()
    for knob, values in {**LAUNCHERS[name].values(devices), **more}.items():
        space.choice(knob, values)
    return space


def words(name, command, devices=4, render=(), config=None, **more):
    space = space_of(name, devices, **more)
    work = Commands(Command(command=command, launcher=name, render=render), space, devices=devices)
    return shlex.split(work.rendered(space.config(**(config or {})), 0, Path("/trial")))


def test_knobs_without_a_place_are_said_and_what_is_said_stays():
    said = words("trainer", f"{sys.executable} train.py --max_steps 7 --per_device_train_batch_size {{micro_batch}}")
    assert said.count("--max_steps") == 1 and said[said.index("--max_steps") + 1] == "7"
    assert said.count("--per_device_train_batch_size") == 1
    assert said[said.index("--output_dir") + 1] == "/trial" and said[said.index("--bf16") + 1] == "false"


def test_options_of_its_own_are_those_of_the_same_name_alone():
    said = words("trainer", "sh train.sh --max_steps_of_warmup 3 --output_dir=here --bf16 {precision == 'bf16'}")
    assert said[said.index("--max_steps") + 1] == "1000" and "--output_dir" not in said and said.count("--bf16") == 1
    with pytest.raises(UsageError, match="the knob 'micro_batch' is used nowhere"):
        words("trainer", "sh train.sh --per_device_train_batch_size 7")


def test_options_go_behind_the_word_that_a_launcher_wants():
    said = words("accelerate", "sh launch train.py --x 1", config={"precision": "bf16"})
    assert said == ["sh", "launch", "--mixed_precision", "bf16", "--dynamo_backend", "no", "train.py", "--x", "1"]
    said = words("accelerate", "sh launch train.py", config={"precision": "fp32", "fusion": True})
    assert said == ["sh", "launch", "--mixed_precision", "no", "--dynamo_backend", "inductor", "train.py"]
    with pytest.raises(UsageError, match="needs 'launch' in the command"):
        words("accelerate", "sh train.py")


def test_a_file_is_told_at_its_paths(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}')
    space = space_of("deepspeed")
    command = Command(
        command="sh train.sh --deepspeed_config {trial_dir}/ds.json", launcher="deepspeed", render=[str(file)]
    )
    work = Commands(command, space, devices=4)
    (rendered,) = work._files
    path = rendered.write(tmp_path, work.values(space.config(zero=3, precision="bf16", micro_batch=2), 0, tmp_path))
    assert json.loads(path.read_text()) == {
        "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
    }  # fmt: skip
    with pytest.raises(UsageError, match="puts knobs into its file: name it"):
        Commands(Command(command="sh train.sh", launcher="deepspeed"), space, devices=4)


def test_a_knob_that_a_launcher_does_not_know_needs_a_place():
    with pytest.raises(UsageError, match="the knob 'unheard' is used nowhere"):
        words("trainer", "sh train.sh", unheard=[1, 2])
    assert "--deep 1" in " ".join(words("trainer", "sh train.sh --deep {unheard}", unheard=[1, 2]))


def test_what_only_matters_on_several_devices_does_not_vary_on_one():
    assert "zero" not in LAUNCHERS["deepspeed"].values(1) and "zero" in LAUNCHERS["deepspeed"].values(2)


def test_an_unknown_launcher_names_the_nearest():
    with pytest.raises(UsageError, match="unknown launcher 'torchtitn'; did you mean 'torchtitan'"):
        find_launcher("torchtitn")


PARSED = {
    "trainer": """
from transformers import HfArgumentParser, TrainingArguments
(made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
print("RESULT", made.per_device_train_batch_size, made.bf16, made.gradient_accumulation_steps, made.max_steps, made.output_dir)
""",
    "lightning": """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel
made = LightningCLI(DemoModel, BoringDataModule, run=False, args=sys.argv[2:]).trainer
print("RESULT", made.precision, made.max_steps, made.accumulate_grad_batches, made.default_root_dir)
""",
    "accelerate": """
from accelerate.commands.launch import launch_command_parser
made = launch_command_parser().parse_args(sys.argv[2:])
print("RESULT", made.mixed_precision, made.dynamo_backend, made.training_script)
""",
}
EXPECTED = {
    "trainer": "4 True 2 1000 /trial",
    "lightning": "bf16-mixed 1000 2 /trial",
    "accelerate": "bf16 no train.py",
}
CONFIG = {
    "trainer": {"micro_batch": 4, "precision": "bf16"},
    "lightning": {"precision": "bf16"},
    "accelerate": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", list(PARSED))
def test_its_own_parser_takes_what_is_said(name, tmp_path):
    script = tmp_path / "launch"
    script.write_text("import sys\n" + PARSED[name].replace("sys.argv[2:]", "sys.argv[1:]"))
    more = {} if name == "accelerate" else {"grad_accum": [2]}
    command = f"{sys.executable} {script}{' --use_cpu true' if name == 'trainer' else ''}"
    command = f"{sys.executable} launch train.py" if name == "accelerate" else command
    said = words(name, command, config=CONFIG[name], **more)
    if name == "accelerate":
        said[1] = str(script)
    out = subprocess.run(said, capture_output=True, text=True, cwd=tmp_path)
    assert f"RESULT {EXPECTED[name]}" in out.stdout, out.stderr[-2000:]


def test_torchtitans_own_parser_takes_what_is_said(tmp_path):
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    script = tmp_path / "train.py"
    script.write_text(
        WITHOUT_TRITON
        + """
from torchtitan.config import ConfigManager
made = ConfigManager().parse_args(sys.argv[1:])
print("RESULT", made.training.local_batch_size, made.parallelism.tensor_parallel_degree, made.training.steps,
      made.metrics.log_freq, made.dump_folder)
"""
    )
    command = f"{sys.executable} {script} --module llama3 --config llama3_debugmodel"
    said = words("torchtitan", command, config={"micro_batch": 4, "tp": 2})
    out = subprocess.run(said, capture_output=True, text=True, cwd=tmp_path)
    assert "RESULT 4 2 1000 1 /trial" in out.stdout, out.stderr[-2000:]


def test_lossy_values_are_tried_where_they_are_allowed():
    assert LAUNCHERS["litgpt"].values(1)["precision"] == ["fp32", "bf16"]
    assert LAUNCHERS["litgpt"].values(1, lossy=True)["precision"] == ["fp32", "bf16", "bf16_pure"]


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_a_launcher_has_standard_values_for_standard_knobs(name):
    from redline.estimator.knob_arrays import knob_arrays
    from redline.estimator.setup import TrainingSetup

    table = knob_arrays(list(space_of(name, devices=1)), TrainingSetup())
    assert set(table.precision.tolist()) <= {"fp32", "bf16"} and set(table.fusion.tolist()) <= {True, False}


def test_what_makes_a_run_short_is_not_what_one_trains_with():
    space = space_of("trainer", devices=1)
    work = Commands(Command(command="sh train.sh", launcher="trainer"), space, devices=1)
    config = space.config(micro_batch=2)
    short, whole = work.rendered(config, 0, Path("/trial")), work.whole(config, 0, Path("/trial"), hosts=1)
    assert "--max_steps 1000" in short and "--output_dir /trial" in short
    assert "--max_steps" not in whole and "/trial" not in whole and "--per_device_train_batch_size 2" in whole


def test_a_global_batch_is_said_to_those_who_derive_the_accumulation_themselves():
    space = space_of("megatron", devices=4)
    space.derive("grad_accum", 16 // space["micro_batch"])
    command = Command(command="sh train.sh", launcher="megatron")
    work = Commands(command, space, devices=4, global_batch=64)
    assert "--global-batch-size 64" in work.rendered(space.config(micro_batch=2), 0, Path())
    with pytest.raises(UsageError, match="say it with --global-batch"):
        Commands(command, space, devices=4)


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name not in (*PARSED, "deepspeed", "torchtitan")])
def test_of_those_that_are_not_installed_the_words_are_whole(name):
    said = words(name, "sh train train.sh", config={"micro_batch": 4})
    assert not any("{" in word or not word for word in said) and "4" in " ".join(said)
