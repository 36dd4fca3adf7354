"""Launchers: each gets the arguments of its own parser, and keeps those that a command already has."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from redline.base.errors import UsageError
from redline.frameworks.registry import LAUNCHERS, find_launcher
from redline.runners.command.command import Command
from redline.runners.command.work import Commands
from redline.space import Space
from redline.tuner.request.options import Request
from redline.tuner.request.target import resolve_task
from without_triton import WITHOUT_TRITON

NOTHING = Command(command="")


def space_of(name, devices=4, **more):
    space = Space()
    for knob, values in {**find_launcher(name).values(NOTHING, devices), **more}.items():
        space.choice(knob, values)
    return space


def words(name, command, devices=4, render=(), config=None, samples="8", **more):
    asked = Command(command=command, launcher=name, render=render, samples=samples)
    space = Space()
    for knob, values in {**find_launcher(name).values(asked, devices), **more}.items():
        space.choice(knob, values)
    work = Commands(asked, space, devices=devices)
    return shlex.split(work.rendered(space.config(**(config or {})), 0, Path("/trial")))


def test_knobs_without_a_place_are_added_and_given_arguments_stay():
    arguments = words(
        "trainer", f"{sys.executable} train.py --max_steps 7 --per_device_train_batch_size {{micro_batch}}"
    )
    assert arguments.count("--max_steps") == 1 and arguments[arguments.index("--max_steps") + 1] == "7"
    assert arguments.count("--per_device_train_batch_size") == 1
    assert (
        arguments[arguments.index("--output_dir") + 1] == "/trial"
        and arguments[arguments.index("--bf16") + 1] == "false"
    )


def test_only_options_of_the_same_name_count_as_given():
    arguments = words("trainer", "sh train.sh --max_steps_of_warmup 3 --output_dir=here --bf16 {precision == 'bf16'}")
    assert arguments[arguments.index("--max_steps") + 1] == "1000" and "--output_dir=here" not in arguments
    assert arguments.count("--bf16") == 1 and "--fp16" not in arguments, (
        "a knob that has a place is the command's affair"
    )
    assert "--per_device_train_batch_size" in (
        arguments := words("trainer", "sh train.sh --per_device_train_batch_size 7")
    )
    assert arguments[arguments.index("--per_device_train_batch_size") + 1] == "7"


@pytest.mark.parametrize(
    ("name", "command", "knobs", "says"),
    [
        (
            "trainer",
            "sh t.sh --bf16 true",
            {"precision": ["fp32", "bf16"]},
            "the command has --bf16 itself, so precision",
        ),
        ("trainer", "sh t.sh --fp16=1", {"precision": ["fp32"]}, "the command has --fp16 itself"),
        ("llamafactory", "sh t.sh bf16=true", {"precision": ["fp32"]}, "the command has bf16 itself"),
        (
            "trainer",
            "sh t.sh --gradient_accumulation_steps 4",
            {"grad_accum": [1, 2]},
            "so grad_accum cannot vary",
        ),
        ("litgpt", "sh t.sh", {"precision": ["fp16"]}, "accepts precision as fp32, bf16, bf16_pure, but got fp16"),
        ("lightning", "sh t.sh", {"zero": [1]}, "accepts zero as 0, 2, but got 1"),
        ("axolotl", "sh train t.yml", {"checkpoint_ratio": [0.5]}, "checkpoint_ratio as 0, 1, but got 0.5"),
        ("trainer", "sh t.sh", {"precision": ["bf16_pure"]}, "as fp32, bf16, fp16, but got bf16_pure"),
    ],
)
def test_a_knob_that_would_do_nothing_or_something_else_is_refused(name, command, knobs, says):
    with pytest.raises(UsageError, match=says):
        words(name, command, **knobs)


def test_samples_of_a_step_are_those_of_the_launchers_own_option():
    def samples(name, command, devices=8, global_batch=None, **knobs):
        space = Space()
        for knob, values in {"micro_batch": [1, 8], **knobs}.items():
            space.choice(knob, values)
        work = Commands(Command(command=command, launcher=name), space, devices=devices, global_batch=global_batch)
        return [work._samples_per_step(work.values(config, 0, Path())) for config in space]

    # An explicit batch is a step's; Megatron's default is one pass of all replicas.
    assert samples("megatron", "sh t.sh --global-batch-size 512") == [512.0, 512.0]
    assert samples("megatron", "sh t.sh --global-batch-size=512") == [512.0, 512.0]
    assert samples("megatron", "sh t.sh", tp=[2]) == [4.0, 32.0]
    assert samples("megatron", "sh t.sh --context-parallel-size {cp}", cp=[4]) == [2.0, 16.0]
    assert samples("litgpt", "sh t.sh --train.global_batch_size 16") == [16.0, 16.0]
    for name in ("litgpt", "megatron-bridge"):
        with pytest.raises(UsageError, match="set it with `global_batch`"):
            samples(name, "sh t.sh")


def test_a_command_with_the_knobs_that_it_has_is_the_user_s_own_unless_a_file_of_it_is_rendered(tmp_path):
    (tmp_path / "a.yaml").write_text("x: '{micro_batch}'\n")
    space = Space()
    space.choice("micro_batch", [2, 4])
    for render, added in ((), False), ((str(tmp_path / "a.yaml"),), True):
        asked = Command(command="sh t.sh", launcher="trainer", render=render)
        work = Commands(asked, space, devices=1, command_knobs={"micro_batch": 2})
        assert ("--per_device_train_batch_size 2" in work.rendered(space.config(micro_batch=2), 0, Path())) is added
        assert "--per_device_train_batch_size 4" in work.rendered(space.config(micro_batch=4), 0, Path())


def test_options_go_behind_the_word_that_a_launcher_wants():
    arguments = words("accelerate", "sh launch train.py --x 1", config={"precision": "bf16"})
    assert arguments == ["sh", "launch", "--mixed_precision", "bf16", "--dynamo_backend", "no", "train.py", "--x", "1"]
    arguments = words("accelerate", "sh launch train.py", config={"precision": "fp32", "fusion": True})
    assert arguments == ["sh", "launch", "--mixed_precision", "no", "--dynamo_backend", "inductor", "train.py"]
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
    with pytest.raises(UsageError, match="the knob 'unheard' is not used"):
        words("trainer", "sh train.sh", unheard=[1, 2])
    assert "--deep 1" in " ".join(words("trainer", "sh train.sh --deep {unheard}", unheard=[1, 2]))


def test_multi_device_knobs_do_not_vary_on_one_device():
    assert "zero" not in find_launcher("deepspeed").values(NOTHING, 1) and "zero" in find_launcher("deepspeed").values(
        NOTHING, 2
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSED)
def test_the_launcher_s_own_parser_accepts_the_arguments(name, tmp_path):
    script = tmp_path / "launch"
    script.write_text("import sys\n" + PARSED[name].replace("sys.argv[2:]", "sys.argv[1:]"))
    more = {} if name == "accelerate" else {"grad_accum": [2]}
    command = f"{sys.executable} {script}{' --use_cpu true' if name == 'trainer' else ''}"
    command = f"{sys.executable} launch train.py" if name == "accelerate" else command
    arguments = words(name, command, config=CONFIG[name], **more)
    if name == "accelerate":
        arguments[1] = str(script)
    out = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert f"RESULT {EXPECTED[name]}" in out.stdout, out.stderr[-2000:]


@pytest.mark.slow
def test_torchtitan_s_own_parser_accepts_the_arguments(tmp_path):
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
    arguments = words("torchtitan", command, config={"micro_batch": 4, "tp": 2})
    out = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert "RESULT 4 2 1000 1 /trial" in out.stdout, out.stderr[-2000:]


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_a_launcher_has_standard_values_for_standard_knobs(name):
    from redline.estimator.knob_arrays import knob_arrays
    from redline.estimator.setup import TrainingSetup

    table = knob_arrays(list(space_of(name, devices=1)), TrainingSetup())
    assert set(table.precision.tolist()) <= {"fp32", "bf16"} and set(table.fusion.tolist()) <= {True, False}


def test_options_that_shorten_a_run_are_not_in_the_training_command():
    space = space_of("trainer", devices=1)
    work = Commands(Command(command="sh train.sh", launcher="trainer"), space, devices=1)
    config = space.config(micro_batch=2)
    short, whole = work.rendered(config, 0, Path("/trial")), work.training_command(config, 0, Path("/trial"), hosts=1)
    assert "--max_steps 1000" in short and "--output_dir /trial" in short
    assert "--max_steps" not in whole and "/trial" not in whole and "--per_device_train_batch_size 2" in whole


@pytest.mark.parametrize(
    ("name", "command", "short", "replaced"),
    [
        (
            "trainer",
            "trl sft --eval_on_start true --output-dir out --push_to_hub --lr 1 --report_to wandb tensorboard --seed=1",
            "trl sft --lr 1 --seed=1 --output_dir /trial --eval_on_start false --eval_strategy no --save_strategy no "
            "--push_to_hub false --report_to none --max_steps 1000",
            "--output-dir out --eval_on_start true --push_to_hub --report_to wandb tensorboard",
        ),
        (
            "trainer",
            "python t.py --load_best_model_at_end --data x --resume_from_checkpoint 'my run' --eval_strategy=steps "
            "--save_strategy no --max-steps 50 --predict_with_generate true",
            "python t.py --data x --max-steps 50 --output_dir /trial --eval_on_start false --eval_strategy no "
            "--save_strategy no --push_to_hub false --report_to none",
            "--eval_strategy=steps --load_best_model_at_end --resume_from_checkpoint 'my run' --predict_with_generate true",
        ),
        (
            "lightning",
            "python t.py fit --trainer.logger WandbLogger --trainer.logger.project=x --trainer.limit_val_batches 0.5",
            "python t.py fit --trainer.default_root_dir /trial --trainer.logger false --trainer.enable_checkpointing "
            "false --trainer.limit_val_batches 0 --trainer.num_sanity_val_steps 0 --trainer.max_steps 1000 "
            "--trainer.callbacks+=TQDMProgressBar",
            "--trainer.logger WandbLogger --trainer.logger.project=x --trainer.limit_val_batches 0.5",
        ),
        (
            "llamafactory",
            "llamafactory-cli train a.yaml push_to_hub=true output_dir=out",
            None,
            "output_dir=out push_to_hub=true",
        ),
        (
            "torchtitan",
            "torchrun -m torchtitan.train --checkpoint.enable activation_checkpoint:full",
            None,
            "--checkpoint.enable",
        ),
        (
            "megatron",
            "torchrun pretrain_gpt.py --save ckpt --save-interval 10 --eval-iters 32 --load ckpt --bf16",
            "torchrun pretrain_gpt.py --bf16 --eval-iters 0 --train-iters 1000 --log-interval 1",
            "--eval-iters 32 --save ckpt --save-interval 10 --load ckpt",
        ),
        ("axolotl", "axolotl train a.yml --eval-steps 10 --wandb-project p", None, "--eval-steps 10 --wandb-project p"),
        ("litgpt", "litgpt finetune m --eval.interval=5 --resume true", None, "--eval.interval=5 --resume true"),
        ("megatron-bridge", "python r.py train.eval_iters=32", None, "train.eval_iters=32"),
    ],
)
def test_options_that_lengthen_or_disturb_a_trial_are_replaced_and_noted(name, command, short, replaced):
    space = Space()
    space.choice("kept", [1, 2])
    command += " --kept {kept}"
    work = Commands(Command(command=command, launcher=name, samples="8"), space, devices=2)
    shown = shlex.split(work.rendered({"kept": 2}, 0, Path("/trial")))
    if short is not None:
        assert sorted(shown) == sorted([*shlex.split(short), "--kept", "2"])
    assert work.training_command({"kept": 2}, 0, Path("/o"), hosts=1) == shlex.join(
        shlex.split(command.replace("{kept}", "2"))
    )
    (note,) = work.notes
    assert f", in place of {replaced}; the winner's command has its own options" in note


def test_launchers_that_derive_the_accumulation_get_the_global_batch():
    space = space_of("megatron", devices=4)
    space.derive("grad_accum", 16 // space["micro_batch"])
    command = Command(command="sh train.sh", launcher="megatron")
    work = Commands(command, space, devices=4, global_batch=64)
    assert "--global-batch-size 64" in work.rendered(space.config(micro_batch=2), 0, Path())
    with pytest.raises(UsageError, match="set it with `global_batch`"):
        Commands(command, space, devices=4)


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name not in (*PARSED, "deepspeed", "torchtitan")])
def test_arguments_of_missing_launchers_are_complete(name):
    arguments = words(name, "sh train train.sh", config={"micro_batch": 4})
    assert not any("{" in word or not word for word in arguments) and "4" in " ".join(arguments)


def test_the_first_trial_is_the_user_s_command_with_what_bounds_its_run_alone():
    command = Command(command="trl sft --model_name_or_path m --dataset_name d", launcher="trainer")
    task = resolve_task(Request(target=command, devices=1))
    default = task.space.default()
    # The defaults of TRL's SFTConfig, not the launcher's first values.
    assert default["precision"] == "bf16" and default["checkpoint_ratio"] == 1 and default["micro_batch"] == 8
    first = task.command.rendered(default, 0, Path("T"))
    assert first.startswith("trl sft --model_name_or_path m --dataset_name d --output_dir T --eval_on_start false")
    assert "--bf16" not in first and "--per_device" not in first and "--gradient_checkpointing" not in first
    larger = task.command.rendered(task.space.config({**default, "micro_batch": 16}), 1, Path("T"))
    assert "--per_device_train_batch_size 16 --bf16 true" in larger and "--gradient_checkpointing true" in larger
