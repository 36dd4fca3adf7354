"""Files and commands of other trainers are read back into the configuration that they state."""

import dataclasses
import json
import shlex
from math import prod
from pathlib import Path

import pytest
from redline.base.errors import UsageError
from redline.frameworks import export_targets, read, render
from redline.frameworks.framework import SettingsReader
from redline.frameworks.registry import FRAMEWORKS, LAUNCHERS, find_framework, find_launcher
from redline.frameworks.trainer_config import SettingsSource, changed_line, combined
from redline.knobs.strategy import Strategy
from redline.results import Measurement, Status, Trial
from redline.runners.command.command import Command
from redline.runners.command.work import Commands
from redline.space import Space

BESIDE = {
    "sequence_parallel": {"tp": 2},
    "pipeline_schedule": {"pp": 2, "grad_accum": 4},
    "virtual_stages": {"pp": 2, "pipeline_schedule": "interleaved", "grad_accum": 4},
    "hsdp": {"zero": 3},
    "etp": {"tp": 2},
    "offload": {"zero": 3},
    "checkpoint_ratio": {"zero": 3},
    "precision": {"zero": 3},
    "reduce_dtype": {"precision": "bf16"},
}
"""Other knobs that a knob needs to have an effect."""
CHUNKS = {"interleaved": 2, "zbv": 2, "zero_bubble": 2}
NUMBERS = {
    "micro_batch": (1, 6),
    "grad_accum": (1, 5),
    "hsdp": (2,),
    "etp": (1,),
    "virtual_stages": (2,),
    "attention": ("sdpa",),
}
"""Values of knobs whose setting equals the knob's value."""
SHAPE = {
    "family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336,
    "vocabulary": 128256, "positions": 8192, "tied": False, "activation": "silu",
}  # fmt: skip
LOST = {
    *(("accelerate", knob) for knob in ("grad_accum", "cp", "sp")),
    *(("lightning", knob) for knob in ("micro_batch", "zero", "offload", "fused_optimizer")),
    ("trainer", "attention"),
}
"""Knobs that an export leaves to the user's code, whatever a user's own file may state."""
SUFFIX = {"yaml": ".yaml", "json": ".json", "shell": ".sh"}


def cases(names):
    for name in names:
        for knob, settings in find_framework(name).knobs.items():
            for value in settings.values or NUMBERS.get(knob, (2, 4)):
                yield pytest.param(name, knob, value, id=f"{name} {knob}={value}")


def config_of(knob, value):
    config = {"micro_batch": 2, "grad_accum": 2, "dp": 4, **BESIDE.get(knob, {}), knob: value}
    if knob == "pipeline_schedule" and value in CHUNKS:
        config["virtual_stages"] = CHUNKS[value]
    return config


def exported(target, config):
    devices = prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))
    trial = Trial(
        number=0, config=config, measurement=Measurement(status=Status.OK, throughput=1.0, unit="t/s", devices=devices)
    )
    asked = {"model": "llama3-8b", "workload": {"spec": "llama3-8b"}, "seq_len": 2048, "shape": SHAPE}
    return render(target, trial, {"asked": {**asked, "devices": {"type": "cuda", "used": devices}}})


def knobs_of(config, devices):
    strategy = Strategy.of(config, devices=devices)
    # Every export states whether the optimizer is fused; None leaves it to the framework.
    return {name: getattr(strategy, name) for name in Strategy.__dataclass_fields__}


@pytest.mark.parametrize(
    ("target", "knob", "value"), list(cases(name for name in export_targets() if name in FRAMEWORKS))
)
def test_exported_knobs_are_read_back_unchanged(target, knob, value, tmp_path):
    config = config_of(knob, value)
    made = exported(target, config)
    path = tmp_path / f"file{SUFFIX[made.form]}"
    path.write_text(made.text)
    found = read(path)
    assert found.framework == target
    devices = prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))
    if (target, knob) in LOST:
        assert any(knob in note or "optimizer" in note for note in made.notes), "what is lost is stated"
        return
    if knob == "attention" and value == "flash_attention_3":
        value = "flash_attention_2"  # Megatron has one name for both
    assert knobs_of(found.on(devices).config, devices)[knob] == knobs_of({**config, knob: value}, devices)[knob]


@pytest.mark.parametrize(
    ("name", "knob"),
    [
        (name, knob)
        for name in LAUNCHERS
        if name != "deepspeed"
        for knob in find_launcher(name).options
        if knob != "optim"
    ],
)
def test_launcher_options_are_read_back_as_the_same_knobs(name, knob):
    launcher, settings = find_launcher(name), find_framework(name).knobs.get(knob)
    accepted = {"precision": ("fp32", "bf16", "fp16"), "checkpoint_ratio": (0, 1), "fusion": (False, True),
                  "kernels": (False, True), "zero": (0, 3), "sequence_parallel": (False, True), **launcher.accepts}  # fmt: skip
    program = {
        "trainer": "python run_clm.py", "accelerate": "accelerate launch train.py", "lightning": "python train.py fit",
        "llamafactory": "llamafactory-cli train", "axolotl": "axolotl train --x 1", "litgpt": "litgpt pretrain m",
        "torchtitan": "python -m torchtitan.train", "megatron": "python pretrain_gpt.py",
        "megatron-bridge": "python run_recipe.py",
    }[name]  # fmt: skip
    for value in accepted.get(knob, (2, 4)):
        if knob == "grad_accum" and settings is None:  # by the global batch
            space = Space()
            micro = space.choice("micro_batch", [2])
            space.derive("grad_accum", 4 * value // (micro * 2))
            asked = Command(command=program, launcher=name)
            work = Commands(asked, space, devices=2, global_batch=4 * value)
            command = work.training_command(space.default(), 0, Path("/t"), hosts=1)
            assert read(shlex.split(command)).on(2).config["grad_accum"] == value, command
            continue
        space = Space()
        space.choice(knob, [value])
        work = Commands(Command(command=program, launcher=name, samples="8"), space, devices=8)
        command = work.training_command(space.default(), 0, Path("/t"), hosts=1)
        assert read(shlex.split(command)).config[knob] == value, command


PRESENT = {
    ("accelerate", "grad_accum"): {"distributed_type": "DEEPSPEED"},
    **{("llamafactory", knob): {"fsdp": True} for knob in ("zero", "offload")},
    ("torchtitan", "sequence_parallel"): {"module": "llama3", "config": "llama3_8b"},
}
"""Settings that a file needs to have, or a knob cannot be set in it."""


@pytest.mark.parametrize(("name", "knob", "value"), list(cases(FRAMEWORKS)))
def test_every_setting_is_read_back_as_the_same_knob(name, knob, value):
    framework, config = find_framework(name), config_of(knob, value)
    if name == "accelerate" and knob in ("tp", "cp"):
        config["zero"] = 3
    present = PRESENT.get((name, knob), {})
    devices = prod(config.get(each, 1) for each in ("tp", "sp", "cp", "pp", "dp"))
    strategy, reader = Strategy.of(config, devices=devices), SettingsReader(present, "x", by_last=framework.by_last)
    can = {each: settings.values for each, settings in framework.knobs.items() if each in config}
    written = {each for each, values in can.items() if each == knob or not values or config[each] in values}
    written = {each for each in written if each == knob or not framework.cannot(each, strategy, reader)}
    settings = present | framework.settings(strategy, reader, written)
    source = SettingsSource(framework=name, where="x", form="yaml", settings=settings, stated=frozenset())
    found = combined([source], {"devices": devices}).on()
    if knob == "attention" and value == "flash_attention_3":
        value = "flash_attention_2"  # Megatron has one name for both
    assert knobs_of(found.config, devices)[knob] == value, settings


# -- files as people write them -------------------------------------------------------------------------------------

TITAN = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B"

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 1

[compile]
enable = false

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
AUTO = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
FSDP1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_activation_checkpointing: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
"""
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: false
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch_fused
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
"""
MEGATRON_175B = """#!/bin/bash
# Runs the 175B model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=16
MASTER_ADDR=localhost
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --clip-grad 1.0
    --fp16   # mixed precision
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --num-layers-per-virtual-pipeline-stage 3
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_torchtitan_file(folder):
    (folder / "llama3_8b.toml").write_text(TITAN)
    found = read("llama3_8b.toml")
    assert (found.framework, found.model, found.seq_len, found.devices) == ("torchtitan", "llama3-8b", 8192, None)
    made = found.on(64).config
    assert {name: made[name] for name in ("tp", "dp", "zero", "micro_batch", "grad_accum", "checkpoint_ratio", "precision")} == {
        "tp": 2, "dp": 32, "zero": 3, "micro_batch": 1, "grad_accum": 1, "checkpoint_ratio": 0.5, "precision": "bf16",
    }  # fmt: skip
    assert made["sequence_parallel"] is True, "torchtitan shards activations beside tp unless it is told not to"
    (change,) = found.on(64).changed({**made, "checkpoint_ratio": 0})[0]
    assert (change.key, change.text) == ("activation_checkpoint.mode", '[activation_checkpoint] mode = "none"')
    with pytest.raises(UsageError, match="^tp 2 must divide the devices, 7"):
        found.on(7)


def test_fsdp_of_the_trainers_command_is_read_and_changed_as_its_parser_takes_it():
    settings = '{"activation_checkpointing": true}'
    found = read(
        f"torchrun --nproc-per-node 8 run_clm.py --fsdp 'full_shard auto_wrap' --fsdp_config '{settings}'"
    ).on()
    assert found.config["checkpoint_ratio"] == 1 and not found.unread
    (change,) = found.changed({**found.config, "zero": 2})[0]
    assert change.text == "--fsdp 'shard_grad_op auto_wrap'"


def test_a_deepspeed_file_with_auto_takes_the_trainers_arguments(folder):
    (folder / "ds_config.json").write_text(json.dumps(AUTO))
    alone = read("ds_config.json")
    assert alone.framework == "deepspeed" and "micro_batch" not in alone.config and alone.config["zero"] == 3
    found = read(
        "deepspeed --num_gpus=8 run_clm.py --deepspeed ds_config.json --model_name_or_path gpt2 --block_size 1024 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --bf16 --gradient_checkpointing"
    )
    assert (found.framework, found.model, found.seq_len, found.devices) == ("trainer", "gpt2", 1024, 8)
    made = found.on()
    assert made.global_batch == 64
    assert {name: made.config[name] for name in ("zero", "offload", "precision", "checkpoint_ratio", "micro_batch")} == {
        "zero": 3, "offload": "optimizer", "precision": "bf16", "checkpoint_ratio": 1, "micro_batch": 4,
    }  # fmt: skip
    changes = made.changed({**made.config, "zero": 2, "offload": "none"})[0]
    assert [(each.where, each.key, each.new) for each in changes] == [
        ("ds_config.json", "zero_optimization.stage", 2), ("ds_config.json", "zero_optimization.offload_optimizer.device", "none")
    ]  # fmt: skip


def test_an_accelerate_file_beside_a_script(folder):
    (folder / "fsdp.yaml").write_text(FSDP1)
    found = read(
        "accelerate launch --config_file fsdp.yaml run_clm.py --config_name llama2-7b --per_device_train_batch_size 2"
    )
    assert found.devices == 16 and found.per_host == 8 and found.model == "llama2-7b"
    assert {name: found.config[name] for name in ("zero", "precision", "checkpoint_ratio", "micro_batch")} == {
        "zero": 2, "precision": "bf16", "checkpoint_ratio": 1, "micro_batch": 2,
    }  # fmt: skip
    made = found.on()
    (change,) = made.changed({**made.config, "zero": 3})[0]
    assert change.text == "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}" and change.where == "fsdp.yaml"
    launched = read("accelerate launch --multi_gpu --num_processes 8 run_clm.py --per_device_train_batch_size 2").on()
    places = {
        change.text: change.where for change in launched.changed({**launched.config, "zero": 3, "micro_batch": 4})[0]
    }
    assert places["--use_fsdp"] == "the command, before the script"
    assert places["--per_device_train_batch_size 4"] == "the command"


def test_the_last_value_of_a_key_counts_as_in_the_trainers_own_reader(folder):
    (folder / "lora.yml").write_text(AXOLOTL + "micro_batch_size: 3\nmicro_batch_size: 5\n")
    assert read("lora.yml").config["micro_batch"] == 5


def test_an_axolotl_file(folder):
    (folder / "lora.yml").write_text(AXOLOTL)
    found = read("lora.yml")
    assert (found.framework, found.model, found.seq_len) == ("axolotl", "NousResearch/Meta-Llama-3-8B", 4096)
    assert found.lora == "r=32,alpha=16,target=all-linear"
    assert {name: found.config[name] for name in ("zero", "precision", "checkpoint_ratio", "attention", "grad_accum")} == {
        "zero": 3, "precision": "bf16", "checkpoint_ratio": 1, "attention": "flash_attention_2", "grad_accum": 4,
    }  # fmt: skip
    assert read("axolotl train lora.yml --micro-batch-size 8").config["micro_batch"] == 8, "the command counts first"


def test_a_llamafactory_file_whose_deepspeed_file_is_elsewhere(folder):
    (folder / "sft.yaml").write_text(FACTORY)
    found = read("llamafactory-cli train sft.yaml per_device_train_batch_size=4")
    assert found.framework == "llamafactory" and found.config["zero"] == 3 and found.config["micro_batch"] == 4
    assert found.config["checkpoint_ratio"] == 1, "it recomputes unless it is told not to"
    assert any("by its name it is ZeRO stage 3" in note for note in found.notes)
    assert found.seq_len == 2048 and found.config["grad_accum"] == 2


def test_a_script_of_megatron(folder):
    (folder / "train_175b.sh").write_text(MEGATRON_175B)
    found = read("train_175b.sh")
    assert (found.framework, found.devices, found.global_batch, found.seq_len) == ("megatron", 128, 1536, 2048)
    assert found.architecture["n_layer"] == 96 and found.architecture["n_inner"] == 4 * 12288
    made = found.on().config
    assert {name: made[name] for name in ("tp", "pp", "dp", "virtual_stages", "precision", "grad_accum", "zero")} == {
        "tp": 8, "pp": 16, "dp": 1, "virtual_stages": 2, "precision": "fp16", "grad_accum": 1536, "zero": 0,
    }  # fmt: skip
    assert any(note.startswith("rampup-batch-size") for note in found.notes)


def test_contradictory_settings_are_refused(folder):
    command = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 3 --global-batch-size 64 --bf16"
    with pytest.raises(UsageError, match="64, is not a multiple of micro_batch 3 .* = 24; the nearest multiple is 72"):
        read(command).on()
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    (folder / "ds.json").write_text(json.dumps({**batch, "zero_optimization": {"stage": 1}}))
    assert read("ds.json").on(16).config["dp"] == 16
    with pytest.raises(UsageError, match="the global batch is 64, but micro_batch 4 .* = 32"):
        read("ds.json").on(8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nothing.toml", "nothing.toml cannot be read: No such file"),
        ("bad.toml", "bad.toml is not valid TOML"),
        ("list.yaml", "must contain a mapping of settings, but contains a list"),
        ("other.yaml", "no framework is recognised in 'other.yaml'.*torchtitan"),
        ("make all", "no framework is recognised in 'make all'.*Megatron-LM"),
        ("torchrun 'pretrain_gpt.py", "cannot be split into words"),
        ("python run_clm.py --deepspeed here.json", "the file here.json of deepspeed is not there"),
    ],
)
def test_unreadable_files_are_named(given, says, folder):
    (folder / "bad.toml").write_text("[job\n")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "other.yaml").write_text("colour: blue\n")
    with pytest.raises(UsageError, match=says):
        read(given)


def megatron(*flags, layers=8):
    command = ["python", "pretrain_gpt.py", "--num-layers", str(layers), "--micro-batch-size", "1", *flags]
    return read([*command, "--hidden-size", "64", "--num-attention-heads", "4", "--global-batch-size", "24"])


@pytest.mark.parametrize(
    ("flags", "stages", "chunks"),
    [
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|tt|t*3|ttL", "1,2,3,2", 1),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|(t|)*2t*5,L", "1,1,1,5", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(tt|)*3ttL", None, 2),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            "1,2,2,3",
            1,
        ),
        ("--pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 2", None, 1),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", "3,5", 1),
    ],
)  # fmt: skip
def test_megatrons_layers_of_each_stage_are_read(flags, stages, chunks):
    found = megatron(*flags.split())
    config = found.on(12).config
    assert (config.get("stage_blocks"), config.get("virtual_stages", 1)) == (stages, chunks)
    assert not any("layers" in note for note in found.notes)


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*8L",  # a stage without layers
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*4L",  # 7 of 8
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*3|ttL",  # three stages
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout [[x]]",
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",  # 5 for three
    ],
)
def test_unsupported_stage_layouts_of_megatron_are_stated(flags):
    found = megatron(*flags.split())
    assert "stage_blocks" not in found.on(4).config
    assert any("even shares of the layers" in note or "cannot be shared by" in note for note in found.notes)


@pytest.mark.parametrize("sizes", ["31,1", "1,2,29", "9,7,8,8"])
def test_stages_of_given_blocks_are_exported_to_megatron_and_read_back(sizes, tmp_path):
    pp = sizes.count(",") + 1
    made = exported("megatron", {"micro_batch": 1, "grad_accum": 8, "pp": pp, "stage_blocks": sizes})
    (tmp_path / "file.sh").write_text(made.text)
    assert read(tmp_path / "file.sh").on(pp).config["stage_blocks"] == sizes
    chunked = {"micro_batch": 1, "grad_accum": 8, "pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}
    made = exported("megatron", {**chunked, "stage_blocks": "9,7,8,8"})
    (tmp_path / "file.sh").write_text(made.text)
    found = read(tmp_path / "file.sh").on(2).config
    assert (found["stage_blocks"], found["virtual_stages"]) == ("9,7,8,8", 2)
    assert "num-virtual-stages" not in made.text, "Megatron takes one of both"


def test_stages_of_given_blocks_are_refused_where_a_framework_cannot_have_them():
    uneven = {"micro_batch": 1, "grad_accum": 8, "pp": 2, "stage_blocks": "31,1"}
    for target in export_targets():
        if target in ("megatron", "python", "yaml", "json", "env"):
            assert "31" in exported(target, uneven).text
            continue
        with pytest.raises(UsageError, match='stage_blocks="31,1" gives stages different numbers of blocks'):
            exported(target, uneven)
        even = exported(target, {**uneven, "stage_blocks": "16,16"})
        assert not any("stage_blocks" in note for note in even.notes)


def test_torchtitans_experts_are_whole_beside_tensor_parallelism(tmp_path):
    config = {
        "micro_batch": 1,
        "grad_accum": 1,
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "zero": 3,
        "ep": 4,
        "etp": 1,
    }
    made = exported("torchtitan", config)
    assert not any("expert" in note or "etp" in note for note in made.notes)
    (tmp_path / "file.sh").write_text(made.text)
    found = read(tmp_path / "file.sh").on(4).config
    assert (found["ep"], found["etp"]) == (4, 1)
    cut = exported("torchtitan", {**config, "ep": 2, "etp": 0})
    assert any("does not cut experts over the tp ranks" in note for note in cut.notes)


def test_a_degree_of_megatrons_experts_between_one_and_tp_is_stated():
    flags = "--tensor-model-parallel-size 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size"
    assert megatron(*flags.split(), "1").on(8).config["etp"] == 1
    assert Strategy.of(megatron(*flags.split(), "4").on(8).config, devices=8).etp == 0
    found = megatron(*flags.split(), "2")
    assert "etp" not in found.on(8).config
    assert any(
        "expert-tensor-parallel-size = 2: the estimate cuts experts over the tp ranks" in each for each in found.notes
    )


def test_megatron_bridges_layers_of_each_stage_are_read():
    command = "python run_recipe.py --recipe llama3 model.pipeline_model_parallel_size=4 train.micro_batch_size=1"
    command += " train.global_batch_size=24"
    found = read([*command.split(), "model.pipeline_model_parallel_layout=Et|tt|t*3|ttL"]).on(4).config
    assert found["stage_blocks"] == "1,2,3,2"
    chunked = read([*command.split(), "model.pipeline_model_parallel_layout=E(t|)*7t*2L"]).on(4).config
    assert (chunked["stage_blocks"], chunked["virtual_stages"]) == ("1,1,1,1,1,1,1,2", 2)
    assert chunked["pipeline_schedule"] == "interleaved"
    ends = [
        "model.num_layers=8",
        "model.num_layers_in_first_pipeline_stage=1",
        "model.num_layers_in_last_pipeline_stage=3",
    ]
    assert read([*command.split(), *ends]).on(4).config["stage_blocks"] == "1,2,2,3"
    assert "stage_blocks" not in read(command.split()).on(4).config


NVME = "--zero_stage 3 --offload_optimizer_device nvme"
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1"
ONE_RANK = f"torchrun --nproc_per_node 1 pretrain_gpt.py {SMALL}"
LIGHTNING = "trainer:\n  accelerator: gpu\n  devices: 8\n  precision: {precision}\n  strategy: {strategy}\n"


@pytest.mark.parametrize(
    ("strategy", "zero", "offload", "weights"),
    [
        ("deepspeed", 2, "none", False),
        ("deepspeed_stage_1", 1, "none", False),
        ("deepspeed_stage_2_offload", 2, "optimizer", False),
        ("deepspeed_stage_3_offload", 3, "optimizer", True),
        ("deepspeed_stage_3_offload_nvme", 3, "optimizer", True),
        ("{class_path: lightning.pytorch.strategies.DeepSpeedStrategy}", 2, "none", False),
        ("{class_path: DeepSpeedStrategy, init_args: {stage: 3}}", 3, "none", False),
        ("{class_path: DeepSpeedStrategy, init_args: {stage: 3, offload_optimizer: true}}", 3, "optimizer", False),
        ("{class_path: DeepSpeedStrategy, init_args: {stage: 3, offload_parameters: true}}", 3, "none", False),
        (
            "{class_path: DeepSpeedStrategy, init_args: {stage: 3, offload_optimizer: true, offload_parameters: true}}",
            3,
            "optimizer",
            True,
        ),
    ],
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_lightnings_deepspeed_has_its_stage_and_its_formats(strategy, zero, offload, weights, precision, folder):
    (folder / "config.yaml").write_text(LIGHTNING.format(precision=precision, strategy=strategy))
    found = read("config.yaml").on()
    assert (found.config["zero"], found.config.get("offload", "none")) == (zero, offload)
    assert found.conventions.get("offload_weights", False) is weights
    narrow = precision != "32-true"
    assert found.config["precision"] == ("bf16" if narrow else "fp32")
    assert found.conventions.get("master_weights") == ("fp32" if narrow else None), "DeepSpeed keeps a master copy"


@pytest.mark.parametrize(
    ("options", "zero", "optimizer"),
    [
        ("--trainer.strategy ddp --optimizer SGD", 0, "sgd"),
        ("--trainer.strategy.class_path DDPStrategy --optimizer.class_path torch.optim.SGD", 0, "sgd"),
        ("--trainer.strategy.class_path lightning.FSDPStrategy --optimizer.lr 0.1", 3, None),
    ],
)
def test_another_class_in_a_command_has_no_arguments_of_that_in_its_file(options, zero, optimizer, folder):
    arguments = "cpu_offload: true, auto_wrap_policy: [a.B], activation_checkpointing_policy: [a.B]"
    strategy = f"{{class_path: lightning.FSDPStrategy, init_args: {{{arguments}}}}}"
    text = LIGHTNING.format(precision="32-true", strategy=strategy)
    (folder / "config.yaml").write_text(text + "optimizer: {class_path: AdamW, init_args: {lr: 1, amsgrad: true}}\n")
    found = read(f"python main.py fit -c config.yaml {options}")
    assert (found.config.get("zero"), found.conventions.get("optimizer")) == (zero, optimizer)
    kept = ("optimizer", 1) if zero == 3 else (None, None)
    assert (found.config.get("offload"), found.config.get("checkpoint_ratio")) == kept
    assert bool(found.unread) is (zero == 3)


def test_litgpts_subcommand_decides_on_adapters_and_recomputation(folder):
    lora = read("litgpt finetune_lora meta-llama/Llama-3.2-1B --devices 4")
    assert lora.model == "meta-llama/Llama-3.2-1B"
    assert (lora.lora, lora.config["checkpoint_ratio"]) == (
        "r=8,alpha=16,target=q_proj+query_key_value+v_proj,dropout=0.05",
        1,
    )
    assert read("litgpt finetune_lora m").config["checkpoint_ratio"] == 0, "FSDP is for several devices"
    more = read("litgpt finetune_lora m --lora_r 32 --lora_key true --lora_value false --lora_mlp true")
    assert more.lora == (
        "r=32,alpha=16,target=q_proj+query_key_value+k_proj+gate_proj+up_proj+down_proj+dense_h_to_4h+dense_4h_to_h+fc1+fc2,"
        "dropout=0.05"
    )
    full = read("litgpt finetune_full m --devices 4")
    assert (full.lora, full.config["checkpoint_ratio"]) == (None, 1)
    whole = read("litgpt pretrain m --devices 4")
    assert (whole.lora, whole.config["checkpoint_ratio"], whole.config["fusion"]) == (None, 0, True)
    assert read("litgpt pretrain m --devices 4 --num_nodes 2").config["hsdp"] == 2
    assert "fusion" not in full.config and "hsdp" not in whole.config
    assert any("refuses quantize" in note for note in read("litgpt finetune m --devices 2 --quantize bnb.nf4").notes)


def test_litgpts_options_replace_settings_of_its_file(folder):
    (folder / "lora.yaml").write_text("checkpoint_dir: m\nlora_r: 32\nlora_alpha: 64\ntrain:\n  micro_batch_size: 2\n")
    found = read("litgpt finetune_lora --config lora.yaml --devices 2 --train.micro_batch_size 3")
    assert found.lora == "r=32,alpha=64,target=q_proj+query_key_value+v_proj,dropout=0.05"
    assert (found.config["micro_batch"], found.config["checkpoint_ratio"], found.devices) == (3, 1, 2)


def test_files_of_data_are_not_those_of_a_trainer(folder):
    (folder / "a.json").write_text('{"text": "data"}')
    command = "python run_clm.py --per_device_train_batch_size 2 --train_files a.json b.json"
    found = read(command)
    assert (found.framework, found.config["micro_batch"]) == ("trainer", 2)
    (folder / "args.json").write_text('{"per_device_train_batch_size": 4, "optim": "adamw_torch"}')
    assert read("python run_clm.py --learning_rate 1e-4 args.json").config["micro_batch"] == 4


@pytest.mark.parametrize(
    ("given", "knob", "value"),
    [
        ("python run_clm.py --fsdp hybrid_shard_zero2 --optim adamw_torch", "zero", 2),
        ("python run_clm.py --fsdp hybrid_shard --optim adamw_torch", "zero", 3),
        ("python run_clm.py --tf32 true --optim adamw_torch", "precision", "tf32"),
        ("python run_clm.py --tf32 true --bf16 true --optim adamw_torch", "precision", "bf16"),
        ("python run_clm.py --tf32 false --optim adamw_torch", "precision", "fp32"),
        ("llamafactory-cli train --stage sft --tf32 true", "precision", "tf32"),
        ("axolotl train --x 1 --tf32 true --bf16 false --micro_batch_size 1", "precision", "tf32"),
        ("axolotl train --x 1 --micro_batch_size 1", "precision", "bf16"),
        ("axolotl train --x 1 --bf16 full --micro_batch_size 1", "precision", "bf16"),
        ("axolotl train --x 1 --fp16 true --micro_batch_size 1", "precision", "fp16"),
        ("axolotl train --x 1 --gradient_checkpointing offload --micro_batch_size 1", "checkpoint_ratio", 1),
        ("axolotl train --x 1 --tf32 true --bf16 true --micro_batch_size 1", "precision", "bf16"),
        ("trl sft --model_name_or_path m", "precision", "bf16"),
        ("trl sft --model_name_or_path m --fp16 true", "precision", "fp16"),
        ("python trl/scripts/sft.py --model_name_or_path m", "checkpoint_ratio", 1),
        ("accelerate launch --use_deepspeed train.py", "zero", 2),
        (f"accelerate launch --use_deepspeed {NVME} train.py", "offload", "optimizer"),
        ("conda run -n x python -m accelerate.commands.launch --mixed_precision bf16 run_clm.py", "precision", "bf16"),
        ("litgpt finetune_full m --devices 4", "micro_batch", 1),
        ("litgpt pretrain m --devices 4", "micro_batch", 4),
        (f"{ONE_RANK} --transformer-impl local", "attention", "eager"),  # its scores are kept
        (f"{ONE_RANK} --transformer-impl transformer_engine", "attention", None),
        (
            "python -m torchtitan.train --job.config_file bare.toml --compile.enable --compile.no-enable",
            "fusion",
            False,
        ),
    ],
)
def test_settings_with_several_spellings_are_read(given, knob, value, folder):
    (folder / "bare.toml").write_text(WRITTEN["bare.toml"] + "[compile]\nenable = true\n")
    assert read(given).config.get(knob) == value


DDP = {"trainer.strategy.class_path": "lightning.pytorch.strategies.DDPStrategy"}
FSDP_OF_LIGHTNING = {"trainer.strategy.class_path": "lightning.FSDPStrategy"}
POLICY = {"auto_wrap_policy": ["a.Block"], "cpu_offload": True, "sharding_strategy": "FULL_SHARD"}
LATENT = {
    "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "num-experts": 4, "swiglu": True,
    "multi-latent-attention": True, "moe-ffn-hidden-size": 64,
}  # fmt: skip
AXOLOTLS = {"base_model": "gpt2", "sequence_len": 64, "fsdp_config.fsdp_version": 2}
STAGE_3 = {"zero_optimization.stage": 3}
PARAMETERS, OPTIMIZER = (f"zero_optimization.offload_{part}.device" for part in ("param", "optimizer"))
PLUGINS = ["x.LigerPlugin", "x.CutCrossEntropyPlugin"]
LOSS = "liger_fused_linear_cross_entropy"
LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
UNREAD = (
    ("deepspeed", {"zero_optimization.stage": 3}, {"zero_optimization.offload_param.device": "nvme"}),
    ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 3},
     {"deepspeed_config.offload_param_device": "nvme"}),
    ("lightning", {}, {"trainer.strategy": "deepspeed_stage_3_offload_nvme"}),
)  # fmt: skip
"""Offload to NVMe, which has no speed in the estimate."""


@pytest.mark.parametrize(
    ("framework", "settings", "values"),
    [
        ("trainer", {"optim": "adamw_bnb_8bit"}, {"optimizer_dtype": "int8"}),
        ("trainer", {"optim": "lion_8bit"}, {"optimizer": "lion", "optimizer_dtype": "int8"}),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True}, {"frozen_bits": 4.5}),
        ("axolotl", {"adapter": "lora", "load_in_8bit": True}, {"frozen_bits": 8.25}),
        ("axolotl", {"adapter": "lora", "load_in_8bit": False}, {"frozen_bits": None}),
        ("llamafactory", {"quantization_bit": 4}, {"frozen_bits": 4.5}),
        ("litgpt", {"quantize": "bnb.nf4", "lora_r": 8}, {"frozen_bits": 4.5}),
        ("trl", {"num_generations": 8, "max_prompt_length": 1024, "max_completion_length": 3072}, {"seq_len": 4096}),
        *(("axolotl", {**AXOLOTLS, f"fsdp_config.{prefix}activation_checkpointing": True,
                       f"fsdp_config.{prefix}reshard_after_forward": False},
           {"checkpoint_ratio": 1, "zero": 2, "unread": {}}) for prefix in ("", "fsdp_")),
        *(("megatron", {**LATENT, "moe-layer-freq": order}, {"first_k_dense_replace": 1})
          for order in ("([0]*1+[1]*3)", "([0]+[1]*3)")),
        ("lightning", {"trainer.strategy": "fsdp"}, {"one_unit": True, "zero": 2, "offload": None}),
        ("lightning", {"trainer.strategy": "fsdp_cpu_offload"}, {"offload": "optimizer", "offload_weights": True}),
        ("lightning", FSDP_OF_LIGHTNING | {f"trainer.strategy.init_args.{name}": value for name, value in POLICY.items()},
         {"one_unit": None, "zero": 3, "offload": "optimizer", "offload_weights": True}),
        ("lightning", {"trainer.strategy": "ddp", "trainer.precision": "bf16-true"},
         {"precision": "bf16_pure", "master_weights": None}),
        *(("llamafactory", {"disable_gradient_checkpointing": True, "gradient_checkpointing": own},
           {"checkpoint_ratio": int(own)}) for own in (True, False)),
        *((framework, {**engine, **unread}, {"unread": unread}) for framework, engine, unread in UNREAD),
        *(("deepspeed", {**STAGE_3, PARAMETERS: "cpu", OPTIMIZER: device}, {"unread": unread, "offload": offload})
          for device, offload, unread in (("none", "none", {PARAMETERS: "cpu"}), ("cpu", "optimizer", {}))),
        ("deepspeed", {"optimizer.type": "SGD", "optimizer.params.momentum": 0.9},
         {"optimizer": "sgd-momentum", "unread": {}}),
        ("deepspeed", {"optimizer.type": "SGD", "optimizer.params.momentum": 0}, {"optimizer": "sgd"}),
        ("litgpt", {"optimizer.class_path": "torch.optim.SGD", "optimizer.init_args.momentum": 0.9},
         {"optimizer": "sgd-momentum"}),
        ("megatron", {"optimizer": "sgd"}, {"optimizer": "sgd-momentum"}),
        ("megatron", {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 4},
         {"unread": {"recompute-num-layers": 4}}),
        ("torchtitan", {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 4,
                        "training.global_batch_size": 64}, {"flushed_samples": 4, "micro_batch": 1}),
        ("llamafactory", {"cutoff_len": "4k"}, {"unread": {"cutoff_len": "4k"}}),
        *(("trl", {"subcommand": kind} | smoothed, {"loss": loss}) for kind, smoothed, loss in (
            ("sft", {"label_smoothing_factor": 0.1}, None), ("grpo", {}, "chunked"), ("reward", {}, None))),
        ("trl", {"subcommand": "grpo"}, {"seq_len": 1024}),
        ("trl", {"use_peft": True}, {"lora": "r=16,alpha=32,dropout=0.05"}),  # of peft's choice
        *((name, {setting: "inductor"} | stated, {"fusion": fusion}) for name, setting, stated, fusion in (
            ("trainer", "torch_compile_backend", {}, True), ("trl", "torch_compile_mode", {}, True),
            ("axolotl", "torch_compile_mode", {}, None), ("axolotl", "torch_compile_mode", {"torch_compile": True}, True))),
        ("trainer", {"label_smoothing_factor": 0.1, "use_liger_kernel": True},
         {"kernels": False, "unread": {"label_smoothing_factor": 0.1}}),
        ("trainer", {"label_smoothing_factor": 0.0}, {"unread": {}}),
        *(("axolotl", {"micro_batch_size": 2, **evaluated}, {"unread": unread}) for evaluated, unread in (
            ({"eval_strategy": "steps"}, {}), ({"eval_batch_size": 8}, {}), ({"evals_per_epoch": 1, "eval_batch_size": 2}, {}),
            ({"evals_per_epoch": 1, "eval_batch_size": 8}, {"eval_batch_size": 8}))),
        ("llamafactory", {"stage": "sft"}, {"lora": "r=8,alpha=16,target=all-linear"}),
        ("trl", {"subcommand": "dpo", "use_liger_kernel": True}, {"kernels": True}),
        # Their losses take logits; the layers are Liger's all the same.
        *(("llamafactory", {"stage": stage, "enable_liger_kernel": True}, {"kernels": True, "loss": loss})
          for stage, loss in (("sft", None), ("dpo", "plain"), ("rm", "plain"))),
        *(("axolotl", {**LIGER, "rl": kind}, {"kernels": kind is None}) for kind in (None, "dpo")),
        ("axolotl", {**LIGER, "rl": "dpo", "liger_rms_norm": True}, {"kernels": True, "loss": "plain"}),
        ("axolotl", {**LIGER, "rl": "dpo", "dpo_use_liger_kernel": True}, {"loss": "chunked", "unread": {}}),
        ("axolotl", {"base_model": "m", "rl": "dpo", "precompute_ref_log_probs": True}, {"reference_model": None, "unread": {}}),
        ("trl", {"subcommand": "orpo"}, {"loss": "plain", "sequences": 2, "reference_model": None}),
        *(("axolotl", {"base_model": "m", **settings}, {"wide_ends": wide}) for settings, wide in (
            ({}, True), ({"flash_attention": True}, False), ({"adapter": "lora", "lora_target_linear": True}, False),
            ({"cut_cross_entropy": True}, False), ({"fsdp_version": 2}, False))),
        *(("lightning", FSDP_OF_LIGHTNING | {"trainer.strategy.init_args.auto_wrap_policy": ["a.Block"],
           f"trainer.strategy.init_args.{name}": ["a.Block"]}, {"checkpoint_ratio": 1, "unread": {}})
          for name in ("activation_checkpointing", "activation_checkpointing_policy")),
        *(("lightning", DDP | {f"trainer.strategy.init_args.{name}": value}, {"zero": 0, "unread": unread, "bucket_copy": copy})
          for name, value, copy, unread in (
            ("find_unused_parameters", True, None, {}), ("gradient_as_bucket_view", True, False, {}),
            ("static_graph", True, None, {}), ("process_group_backend", "nccl", None, {}),
            ("process_group_backend", "gloo", None, {"trainer.strategy.init_args.process_group_backend": "gloo"}),
            ("ddp_comm_hook", "x.hook", None, {"trainer.strategy.init_args.ddp_comm_hook": "x.hook"}))),
        *(("axolotl", {"base_model": "m", "plugins": PLUGINS, **settings}, {"kernels": fused})
          for settings, fused in (({}, True), ({"cut_cross_entropy": False}, None),
                                  ({"cut_cross_entropy": True, LOSS: False}, True),
                                  ({"cut_cross_entropy": False, LOSS: True}, True))),
        ("axolotl", {"base_model": "m", "cut_cross_entropy": True}, {"kernels": None}),
        ("lightning", {"trainer.devices": [0, 1, 2, 3], "trainer.num_nodes": 2}, {"devices": 8, "per_host": 4, "unread": {}}),
        *((name, {"bf16": True, "fp16": True}, {"precision": "bf16"}) for name in ("trainer", "trl", "axolotl")),
        ("litgpt", {"lora_r": 8, "lora_query": False, "lora_value": False, "checkpoint_dir": "m"},
         {"unread": {"lora_query": False, "lora_value": False}}),
        *(("litgpt", {"checkpoint_dir": path, "lora_r": 8}, {"model": "org/name"}) for path in (
            "checkpoints/org/name", "/data/checkpoints/org/name/", "checkpoints/org/name/lit_model.pth")),
        *(("nanotron", {"tokens.micro_batch_size": 1, **settings}, {"unread": unread}) for settings, unread in (
            ({"model.dtype": "bfloat16", "optimizer.adam_eps": 1e-8, "data.seed": 1}, {}),
            ({"optimizer.torch_adam_is_fused": True}, {}),
            ({"parallelism.tp_linear_async_communication": True, "optimizer.learning_rate": 1, "dtype": "bfloat16"}, {}),
            ({"model.dtype": "float32"}, {"model.dtype": "float32"}))),
    ],
)  # fmt: skip
def test_settings_mean_what_their_framework_makes_of_them(framework, settings, values):
    reader = find_framework(framework).reading(settings, "x")
    found = {**reader.knobs, **reader.facts, **reader.facts.get("architecture", {}), **reader.conventions}
    assert {name: found.get(name) for name in values} == values


FLOAT8 = {"float8.enable_fsdp_float8_all_gather": True}


@pytest.mark.parametrize(
    ("framework", "settings", "note"),
    [
        ("torchtitan", {"parallelism.tensor_paralel_degree": 2}, "did you mean parallelism.tensor_parallel_degree?"),
        ("torchtitan", {"training.local_batch_sise": 4}, "did you mean training.local_batch_size?"),
        ("megatron", {"use-distributed-optimiser": True}, "did you mean use_distributed_optimizer?"),
        ("trainer", {"per_device_train_batchsize": 4}, "did you mean per_device_train_batch_size?"),
        ("trainer", {"gradient_acumulation_steps": 4}, "did you mean gradient_accumulation_steps?"),
        ("deepspeed", {"zero_optimization.stge": 2}, "did you mean zero_optimization.stage?"),
        ("torchtitan", {"activation_checkpoint.mode": "sometimes"}, "mode = sometimes is not a value of"),
        ("deepspeed", {"zero_optimization.stage": 5}, "zero_optimization.stage = 5 is not a value of zero"),
        ("megatron", {"recompute-granularity": "everything"}, "recompute-granularity = everything is not a value that"),
        ("torchtitan", {"activation_checkpoint.mode": "selective"}, None),
        ("trainer", {"optim": "adafactor"}, None),
        ("deepspeed", {"zero_optimization.stage": "auto"}, None),
        ("trainer", {"optim": "lion_8bit"}, None),
        ("torchtitan", FLOAT8, "[float8] has no effect"),
        ("torchtitan", FLOAT8 | {"model.converters": ["float8"]}, None),
        ("torchtitan", {"quantize.linear.float8.recipe_name": "rowwise"}, "[quantize.linear.float8] has no effect"),
        ("lightning", {"trainer.strategy": "fsdp"}, "without auto_wrap_policy"),
        ("torchtitan", {"compile.enable_async_tensor_parallel": True}, "torchtitan refuses"),
        ("deepspeed", {"zero_optimization.stage": 2, PARAMETERS: "cpu"}, "has no effect below stage 3"),
    ],
)
def test_settings_that_are_misspelt_or_without_effect_are_noted(framework, settings, note):
    notes = find_framework(framework).reading(settings, "x").notes
    about = (
        "did you mean",
        "is not a value ",
        "has no effect",
        "titan refuses",
        "two states in float32",
        "without auto_wrap_policy",
    )
    noted = [each for each in notes if any(words in each for words in about)]
    assert len(noted) == bool(note) and all(note in each for each in noted)


def test_settings_of_the_installed_trainers_are_not_taken_for_misspelt_ones():
    accelerate = pytest.importorskip("accelerate.utils.dataclasses")
    transformers = pytest.importorskip("transformers")
    names = {
        "trainer": [each.name for each in dataclasses.fields(transformers.TrainingArguments)],
        "accelerate": [
            f"fsdp_config.fsdp_{each.name}" for each in dataclasses.fields(accelerate.FullyShardedDataParallelPlugin)
        ],
    }
    names |= dict.fromkeys(("axolotl", "llamafactory"), names["trainer"])
    for framework, settings in names.items():
        for name in settings:
            notes = find_framework(framework).reading({name: 1}, "x").notes
            assert not any("did you mean" in each for each in notes), (framework, name, notes)


TITAN_03 = "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config"
PRETRAIN = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--ffn-hidden-size 14336 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000"
)
RECIPE = (
    "python run_recipe.py --recipe llama3_8b train.micro_batch_size=1 train.global_batch_size=64 model.num_layers=32"
)
QLORA = "trl sft --model_name_or_path m --use_peft --lora_r 32 --load_in_4bit"
WRITTEN = {
    "titan.toml": TITAN,
    "bare.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[metrics]\nlog_freq = 1\n',
    "axolotl.yml": AXOLOTL.replace("adapter: lora", "adapter: qlora\nrl: dpo"),
    "ds.json": json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}),
    "hpz.json": json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}),
    "sft.yaml": "model_name_or_path: m\nper_device_train_batch_size: 2\noptim: adamw_torch\nbf16: false\n",
    "accelerate.yaml": "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {gradient_clipping: 1.0}\n",
    "lightning.yaml": (
        "trainer:\n  accelerator: gpu\n  devices: 8\n  strategy:\n    class_path: ModelParallelStrategy\n"
    ),
    "ulysses.yaml": (
        "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\nparallelism_config:\n"
        "  parallelism_config_sp_size: 4\n  parallelism_config_dp_shard_size: 2\n"
    ),
}


@pytest.mark.parametrize(
    ("given", "values", "note"),
    [
        (f"{TITAN_03} llama3_8b", {"micro_batch": 1, "seq_len": 8192, "checkpoint_ratio": 0}, None),
        (f"{TITAN_03} llama3_70b", {"micro_batch": 8, "tp": 8, "checkpoint_ratio": 1}, None),
        (f"{TITAN_03} llama3_405b", {"micro_batch": None, "seq_len": None}, "config = llama3_405b sets are not read"),
        ("bare.toml", {"micro_batch": 8, "seq_len": 2048, "checkpoint_ratio": 0.5}, None),
        (
            "CONFIG_FILE=titan.toml ./run_train.sh --training.steps 9",
            {"micro_batch": 1, "seq_len": 8192, "tp": 2},
            None,
        ),
        (
            f"{RECIPE} model.recompute_granularity=full",
            {"checkpoint_ratio": None},
            "recipe = llama3_8b sets are not read",
        ),
        (
            f"{RECIPE} model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=16",
            {"checkpoint_ratio": 0.5},
            "recipe = llama3_8b sets are not read",
        ),
        (f"{PRETRAIN} --use-megatron-fsdp", {"zero": 0}, None),
        (f"{PRETRAIN} --use-custom-fsdp --data-parallel-sharding-strategy optim", {"zero": 1}, None),
        (f"{PRETRAIN} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}, None),
        (
            f"{PRETRAIN} --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
            {"zero": 1},
            "data-parallel-sharding-strategy = optim_grads_params has no effect without use-megatron-fsdp",
        ),
        (PRETRAIN.replace("--vocab-size 32000", ""), {}, "50,304 tokens are assumed; add --vocab-size N"),
        (
            f"{PRETRAIN} --recompute-granularity selective --recompute-modules core_attn other",
            {},
            "unread: recompute-modules",
        ),
        (f"{PRETRAIN} --cp-comm-type a2a", {}, "unread: cp-comm-type"),
        (
            "deepspeed --num_gpus 8 train.py --deepspeed_config ds.json",
            {"framework": "deepspeed", "devices": 8, "zero": 1, "micro_batch": 2},
            None,
        ),
        ("deepspeed --include a:0,1@b:0,1 t.py --deepspeed_config ds.json", {"devices": 4, "per_host": 2}, None),
        ("hpz.json", {"zero": 3}, "unread: zero_optimization.zero_hpz_partition_size"),
        (
            "NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train stage=pt packing=true",
            {"devices": 16, "per_host": 8},
            None,
        ),
        (
            "llamafactory-cli train stage=dpo bf16=true",
            {"lora": "r=8,alpha=16,target=all-linear", "seq_len": 2048},
            "stage = dpo: estimated like supervised training, with pairs of sequences",
        ),
        ("llamafactory-cli train stage=sft finetuning_type=oft", {"lora": None}, "unread: finetuning_type"),
        (
            "axolotl.yml",
            {"lora": "r=32,alpha=16,target=all-linear"},
            "rl = dpo: estimated like supervised training, with pairs",
        ),
        ("axolotl train axolotl.yml --micro-batch-size 8", {"micro_batch": 8}, "load_in_4bit = True"),
        (
            QLORA,
            {
                "lora": "r=32,alpha=32,dropout=0.05",
                "checkpoint_ratio": 1,
                "precision": "bf16",
                "seq_len": 1024,
            },
            "load_in_4bit = True: frozen weights are taken to have 4.5 bits",
        ),
        ("trl sft --config sft.yaml", {"micro_batch": 2, "precision": "fp32", "checkpoint_ratio": 1}, None),
        (
            "trl dpo --model_name_or_path m --max_length 512",
            {"seq_len": 512},
            "trl dpo: estimated like supervised training, with pairs of sequences, and a reference model",
        ),
        ("python run_clm.py --model_name_or_path gpt2", {"precision": "fp32"}, "usually bf16, unless FSDP widens them"),
        ("python run_clm.py --config_name gpt2", {"precision": "fp32"}, None),
        ("accelerate.yaml", {"zero": 2}, None),
        ("lightning.yaml", {"devices": 8}, "state them by --fix zero=3 --fix checkpoint_ratio=1"),
        ("ulysses.yaml", {"sp": 4, "dp": 2, "devices": 8}, None),
        ("litgpt finetune_lora m --quantize bnb.nf4", {"micro_batch": 1, "global_batch": 16}, "quantize = bnb.nf4"),
        ("litgpt pretrain m --devices 4", {"micro_batch": 4, "global_batch": 512}, None),
    ],
)
def test_a_missing_setting_has_the_frameworks_default_and_an_unknown_one_a_note(given, values, note, folder):
    for name, text in WRITTEN.items():
        (folder / name).write_text(text)
    found = read(given)
    assert {name: getattr(found, name, found.config.get(name)) for name in values} == values
    about = ("is not taken", "are not", "assumed", "the estimate", "has no effect", "state them", "estimated")
    expected = [each for each in found.notes if any(words in each for words in about)]
    expected += [f"unread: {name}" for name in found.unread]
    assert any(note in each for each in expected) if note else all("packing" in each for each in expected)


EXPERTS = "--swiglu --num-experts 8"


@pytest.mark.parametrize(
    ("flags", "architecture", "note"),
    [
        (
            "--squared-relu --group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights",
            {"model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": False, "intermediate_size": 9557},
            "the MLP has no gate",
        ),
        (
            "--num-experts 8",
            {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 9557},
            "has no gate",
        ),
        ("--no-rope-fusion", {"model_type": "gpt2", "n_inner": 14336}, None),
        (f"{EXPERTS} --moe-layer-freq 2", {"model_type": "mixtral"}, "moe-layer-freq = 2: all layers are taken"),
        (f"{EXPERTS} --moe-layer-freq ([1]*32)", {"model_type": "mixtral", "intermediate_size": 14336}, None),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 14336",
            {"model_type": "mixtral"},
            "unread: moe-shared-expert-intermediate-size",
        ),
        (
            f"{EXPERTS} --multi-latent-attention --moe-layer-freq ([0]*3+[1]*29) --moe-shared-expert-intermediate-size 28672",
            {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_shared_experts": 2},
            None,
        ),
        ("--swiglu --multi-latent-attention", {"model_type": "llama"}, "multi-latent-attention is taken for plain"),
    ],
)
def test_megatrons_flags_without_a_counterpart_in_the_model_are_noted(flags, architecture, note):
    found = read([*PRETRAIN.split(), *flags.split()])
    assert {name: found.architecture[name] for name in architecture} == architecture
    notes = [*found.notes, *(f"unread: {name}" for name in found.unread)]
    assert (any(note in each for each in notes)) if note else not notes


@pytest.mark.parametrize(
    ("framework", "form", "key", "new", "text"),
    [
        ("deepspeed", "json", "zero_optimization.stage", 2, '"zero_optimization": {"stage": 2}'),
        ("torchtitan", "toml", "training.seq_len", 4096, "[training] seq_len = 4096"),
        ("torchtitan", "options", "compile.enable", True, "--compile.enable"),
        ("torchtitan", "options", "compile.enable", False, "--compile.no_enable"),
        ("megatron-bridge", "assignments", "model.sequence_parallel", None, "without model.sequence_parallel"),
        ("trainer", "options", "gradient_checkpointing", None, "without --gradient_checkpointing"),
    ],
)
def test_a_changed_line_is_one_of_its_file(framework, form, key, new, text):
    source = SettingsSource(framework=framework, where="x", form=form, settings={}, stated=frozenset())
    assert changed_line(source, SettingsReader({}, "x"), key, new).text == text


def test_changed_recomputation_of_torchtitan_0_3_is_a_subcommand():
    found = read(f"{TITAN_03} llama3_70b").on(16)
    assert [each.text for each in found.changed({**found.config, "checkpoint_ratio": 0})[0]] == [
        "activation_checkpoint:none"
    ]
    assert found.changed({**found.config, "checkpoint_ratio": 0.5}) is None


@pytest.mark.parametrize(
    ("degree", "pp", "devices"),
    [("${PP:-2}", 2, 16), ("${PP-2}", 2, 16), ('${PP:-"4"}', 4, 16), ('"${PP:-4}"', 4, 16)],
)
def test_a_variable_s_default_in_a_script_is_its_value(folder, degree, pp, devices):
    (folder / "train.sh").write_text(
        f"NNODES=${{NNODES:-2}}\nPP={degree}\ntorchrun --nproc_per_node 8 --nnodes $NNODES --master_addr "
        '"$HOST:${PORT:-29500}" pretrain_gpt.py --bf16 $EXTRA --pipeline-model-parallel-size $PP --micro-batch-size 1 "$@"\n'
    )
    found = read("train.sh")
    assert (found.config["pp"], found.devices, found.config["micro_batch"]) == (pp, devices, 1)
    assert found.config["precision"] == "bf16" and not found.unset


def test_sizes_of_unset_variables_are_unknown(folder):
    (folder / "train.sh").write_text(
        "PP=$2\ntorchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py --bf16 --pipeline-model-parallel-size $PP "
        "--global-batch-size $((MBS * 8)) --micro-batch-size 1 --seq-length $SEQ --data-path $DATA\n"
    )
    found = read("train.sh")
    assert "pp" not in found.config and (found.devices, found.per_host) == (None, 8)
    assert found.unset == {
        "--devices N": "nnodes = $SLURM_NNODES", "--fix pp=N": "pipeline-model-parallel-size = $2",
        "--seq-len N": "seq-length = $SEQ", "--global-batch N": "global-batch-size = $((MBS * 8))",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "given", "total", "wanted", "lines"),
    [
        (
            "fsdp.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n",
            {"micro_batch": 2}, 64, {"micro_batch": 4, "grad_accum": 2},
            ["--fix micro_batch=4"],
        ),
        ("t.toml", TITAN, {}, 64, {"checkpoint_ratio": 0}, ['[activation_checkpoint] mode = "none"']),
        ("ds.json", json.dumps(AUTO), {"micro_batch": 2}, None, {"zero": 2}, ['"zero_optimization": {"stage": 2}']),
        ("train.sh", MEGATRON_175B, {}, 3072, {"micro_batch": 2, "grad_accum": 1536}, ["--micro-batch-size 2"]),
    ],
)  # fmt: skip
def test_a_change_is_found_beside_given_knobs_and_a_given_batch(folder, file, text, given, total, wanted, lines):
    (folder / file).write_text(text)
    found = read(file)
    made = found.beside(given, total).on(found.devices or 16)
    changes, again = made.changed({**made.config, **wanted})
    assert [change.text for change in changes] == lines
    assert again.strategy() == Strategy.of({**made.config, **wanted}) and again.global_batch == made.global_batch


NANOTRON = """
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16,
    num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 4096, tie_word_embeddings: true}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
parallelism: {dp: 8, pp: 1, tp: 2, expert_parallel_size: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 4, sequence_length: 4096}
"""


def test_a_nanotron_file(folder):
    (folder / "n.yaml").write_text(NANOTRON)
    found = read("n.yaml")
    assert (found.framework, found.devices, found.seq_len, found.notes) == ("nanotron", 16, 4096, ())
    assert found.architecture["num_hidden_layers"] == 16 and found.on().global_batch == 64
    made = found.on().config
    assert {name: made[name] for name in ("tp", "zero", "micro_batch", "grad_accum", "sequence_parallel")} == {
        "tp": 2, "zero": 1, "micro_batch": 2, "grad_accum": 4, "sequence_parallel": True,
    }  # fmt: skip
    changes = found.on().changed({**made, "tp": 1, "dp": 16, "micro_batch": 1})[0]
    assert {each.text for each in changes} == {
        "tokens: {micro_batch_size: 1}", "parallelism: {tp: 1}", "parallelism: {dp: 16}",
    }  # fmt: skip
    assert read("torchrun --nproc_per_node 8 run_train.py --config-file n.yaml").framework == "nanotron"


@pytest.mark.parametrize("fsdp", ["fsdp_version: 2\n", "fsdp: [full_shard, auto_wrap]\n"])
def test_full_fine_tuning_of_axolotl_by_fsdp_is_axolotls(folder, fsdp):
    settings = (
        "offload_params",
        "cpu_ram_efficient_loading",
        "use_orig_params",
        "sync_module_states",
        "limit_all_gathers",
    )
    (folder / "full.yaml").write_text(
        "base_model: meta-llama/Llama-3.1-8B\ndatasets: [{path: x}]\nsequence_len: 4096\nmicro_batch_size: 2\nbf16: auto\n"
        f"gradient_accumulation_steps: 4\ngradient_checkpointing: true\noptimizer: adamw_torch\n{fsdp}fsdp_config:\n"
        + "".join(f"  {name}: false\n" for name in settings)
        + "".join(f"  fsdp_{name}: false\n" for name in settings)
    )
    found = read("full.yaml")
    assert (found.framework, found.model, found.seq_len) == ("axolotl", "meta-llama/Llama-3.1-8B", 4096)
    assert (found.config["micro_batch"], found.config["zero"], found.config["precision"]) == (2, 3, "bf16")


def test_a_torchtitan_option_with_no_switches_a_setting_off(folder):
    found = read(
        "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b --compile.no_enable "
        "--parallelism.tensor_parallel_degree 2 --parallelism.no_enable_sequence_parallel"
    )
    assert found.config["sequence_parallel"] is False and found.config["fusion"] is False
    assert not any("no_enable" in note for note in found.notes)


@pytest.mark.parametrize(
    ("command", "facts", "conventions"),
    [
        ("llamafactory-cli train stage=sft finetuning_type=freeze freeze_trainable_layers=3",
         {"trained_blocks": 3}, {"frozen_bits": 16}),
        ("llamafactory-cli train stage=sft finetuning_type=full use_badam=true pure_bf16=true",
         {"trained_blocks": -1}, {"precision": "bf16_pure", "master_weights": "fp32"}),
        ("llamafactory-cli train stage=sft finetuning_type=full use_galore=true galore_rank=8", {"low_rank": 8}, {}),
        ("python run_clm.py --optim apollo_adamw --optim_target_modules attn mlp --optim_args rank=256,scale=1",
         {"low_rank": 256, "unread": {}}, {}),
        ("python run_clm.py --optim galore_adamw_8bit --optim_target_modules all-linear",
         {"low_rank": 128}, {"optimizer_dtype": "int8"}),
        (f"{PRETRAIN} --recompute-granularity selective --recompute-modules moe_act layernorm", {},
         {"recompute_modules": "moe_act+layernorm", "recompute_attention": False}),
        (f"{PRETRAIN} --overlap-moe-expert-parallel-comm --moe-router-force-load-balancing --moe-enable-deepep", {},
         {"overlap_experts": True, "balanced_experts": True, "rows_once_a_node": True}),
        ("python run_recipe.py --recipe x train.micro_batch_size=1 train.global_batch_size=8 comm_overlap.tp_comm_overlap=true",
         {}, {"overlap_tensor": True}),
        ("python -m torchtitan.train --module llama3 --config llama3_8b --debug.moe_force_load_balance --compile.enable "
         "--compile.enable_async_tensor_parallel activation_checkpoint:full", {"unread": {}, "notes": ()},
         {"overlap_tensor": True, "balanced_experts": True, "loss": "chunked"}),
        ("trl sft --model_name_or_path gpt2 --num_processes 4 --accelerate_config zero2", {"unread": {}, "devices": 4},
         {"unsharded_gradients": None, "master_weights": "fp32"}),
        ("trl sft --model_name_or_path gpt2 --accelerate_config mine", {"unread": {"accelerate_config": "mine"}}, {}),
        ("trl sft --model_name_or_path gpt2 --activation_offloading true", {"unread": {}}, {"offload_activations": True}),
        ("trl sft --model_name_or_path m", {}, {"loss": "chunked"}),
        ("trl sft --model_name_or_path m --loss_type chunked_nll", {}, {"loss": "chunked"}),
        ("trl sft --model_name_or_path m --loss_type chunked_nll --use_liger_kernel true", {}, {"loss": "chunked"}),
        ("trl dpo --model_name_or_path m", {}, {"loss": "chunked"}),
        ("python -m torchtitan.train --model.name llama3 --model.flavor 8B", {}, {"loss": "plain"}),
        (f"{ONE_RANK} --bf16", {}, {"gradient_dtype": "fp32"}),
        (f"{ONE_RANK} --bf16 --grad-reduce-in-bf16", {}, {"gradient_dtype": "bf16"}),
        (f"{ONE_RANK} --fp16", {}, {"gradient_dtype": "bf16"}),
        (f"{ONE_RANK} --fp16 --accumulate-allreduce-grads-in-fp32", {}, {"gradient_dtype": "fp32"}),
        ("torchrun --nproc_per_node 8 pretrain_llama3_8b.py train.micro_batch_size=2 model.seq_length=64 train.iters=1",
         {"framework": "megatron-bridge"}, {}),
    ],
)  # fmt: skip
def test_what_is_trained_and_what_overlaps_reach_the_estimate(command, facts, conventions):
    found = read(command)
    assert {name: getattr(found, name) for name in facts} == facts
    assert {name: found.conventions.get(name) for name in conventions} == conventions


@pytest.mark.parametrize(
    ("compiled", "loss", "fusion"),
    [
        ("enable = true", "compiled", True),
        ('enable = true\ncomponents = ["loss"]', "compiled", False),
        ('enable = true\ncomponents = ["model"]', "plain", True),
        ("enable = false", "plain", False),
    ],
)
def test_torchtitan_compiles_the_model_the_loss_or_both(compiled, loss, fusion, tmp_path):
    (tmp_path / "t.toml").write_text(f"[training]\nlocal_batch_size = 1\n[compile]\n{compiled}\n")
    found = read(tmp_path / "t.toml")
    assert (found.conventions["loss"], found.config["fusion"]) == (loss, fusion)


def test_a_variable_that_may_hold_options_is_named():
    found = read(
        "source /nowhere.sh\npython run_clm.py --output_dir x --bf16 $EXTRA --model_name_or_path gpt2 --seed $SEED"
    )
    assert [note for note in found.notes if "not set" in note] == [
        "$EXTRA is not set: what it adds to the command is not known"
    ]


def test_a_variable_that_names_the_engines_file_leaves_the_sharding_open():
    command = "deepspeed --num_gpus 2 run_clm.py --per_device_train_batch_size 2 --eval_strategy no --deepspeed $DS"
    assert read(command).unset == {"--fix zero=N": "deepspeed = $DS"}


def test_checkpointing_that_an_engine_leaves_out_is_still_the_trainers(tmp_path):
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_activation_checkpointing: false, fsdp_version: 2}\n"
    )
    command = f"accelerate launch --config_file {tmp_path}/fsdp.yaml src/train.py --stage sft --finetuning_type lora"
    assert read(f"{command} --model_name_or_path gpt2").config["checkpoint_ratio"] == 1


def test_options_behind_dashes_are_those_of_axolotls_launcher(tmp_path):
    (tmp_path / "a.yaml").write_text("base_model: gpt2\nsequence_len: 64\nadapter: lora\n")
    for options in ("--launcher torchrun -- --nproc_per_node=2 --nnodes=2", "-- --num_processes 4"):
        trainer = read(f"axolotl train {tmp_path}/a.yaml --micro-batch-size 3 {options}")
        assert trainer.devices == 4 and trainer.config["micro_batch"] == 3 and not trainer.unread
    assert not read(f"accelerate launch --num_processes 4 -m axolotl.cli.train {tmp_path}/a.yaml").unread


def test_a_script_of_another_kind_of_model_is_named():
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --seq-length 64 --fp16"
    notes = {
        script: read(f"torchrun --nproc_per_node 1 {script} {flags}").notes
        for script in ("pretrain_bert.py", "pretrain_gpt.py")
    }
    assert any("another kind of model (bert)" in note for note in notes["pretrain_bert.py"])
    assert not any("another kind" in note for note in notes["pretrain_gpt.py"])


@pytest.mark.parametrize(("strategy", "zero"), [("HYBRID_SHARD", 3), ("HYBRID_SHARD_ZERO2", 2), ("4", 3), ("5", 2)])
def test_hybrid_shards_are_replicated_over_hosts(folder, strategy, zero):
    (folder / "fsdp.yaml").write_text(FSDP1.replace("SHARD_GRAD_OP", strategy))
    config = read("fsdp.yaml").on().config
    assert (config["zero"], config["hsdp"], config["dp"]) == (zero, 2, 16)
    settings = {"trainer.devices": 8, "trainer.num_nodes": 4, "trainer.strategy.init_args.sharding_strategy": strategy}
    lightning = find_framework("lightning").reading({"trainer.strategy.class_path": "FSDPStrategy", **settings}, "x")
    assert lightning.facts.get("hybrid", False) is strategy.startswith("HYBRID")


@pytest.mark.parametrize(("setting", "is_refused"), [("", True), (" deepspeed=ds_z3.json", False)])
def test_badam_without_deepspeed_is_said_to_be_refused_on_several_devices(setting, is_refused):
    command = f"llamafactory-cli train stage=sft finetuning_type=full use_badam=true{setting}"
    notes = read(command, files=False).notes
    assert any("use_badam: LLaMA-Factory refuses it on more than one device" in note for note in notes) is is_refused


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/home/victor/vision/pretrain_gpt.py", None),
        ("/predict/megatron/train.py", None),
        ("/m/pretrain_bert.py", "bert"),
        ("/m/examples/multimodal/train.py", "multimodal"),
    ],
)
def test_another_kind_of_megatrons_models_is_told_by_words_of_its_script(command, kind):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --seq-length 64"
    notes = read(f"python {command} {flags} --tensor-model-parallel-size 1 --max-position-embeddings 64").notes
    told = [note for note in notes if "another kind of model" in note]
    assert bool(told) is (kind is not None) and all(f"({kind})" in note for note in told)


@pytest.mark.parametrize(
    ("file", "zero", "offload", "unread"),
    [
        ("zero3_bf16.json", 3, "none", set()),
        ("zero2.json", 2, "none", set()),
        ("ds_z2_offload_config.json", 2, "optimizer", set()),
        ("ds_z3_offload_config.json", 3, "optimizer", {"deepspeed"}),
        ("zero3_bf16_cpuoffload_all.json", 3, "optimizer", set()),
        ("stage3_offload_optim_config.json", 3, "optimizer", set()),
        ("zero3_bf16_cpuoffload_params.json", 3, "none", {"zero_optimization.offload_param.device"}),
    ],
)
def test_what_the_name_of_an_absent_engine_file_leaves_open_is_listed(file, zero, offload, unread):
    found = read(f"python run_clm.py --bf16 --per_device_train_batch_size 1 --deepspeed configs/{file}")
    assert (found.config["zero"], found.config.get("offload", "none")) == (zero, offload)
    assert set(found.unread) == unread
    assert any(f"{file} is not there; by its name it is ZeRO stage {zero}" in note for note in found.notes)
    assert bool(found.conventions.get("offload_weights")) is (
        file in ("zero3_bf16_cpuoffload_all.json", "ds_z3_offload_config.json")
    )


def test_a_file_of_deepspeed_replaces_arguments_of_lightnings_strategy(folder):
    (folder / "ds.conf").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    strategy = "{class_path: x.DeepSpeedStrategy, init_args: {stage: 3, offload_optimizer: true, config: ds.conf}}"
    (folder / "l.yaml").write_text(LIGHTNING.format(precision="bf16-mixed", strategy=strategy))
    found = read("python main.py fit -c l.yaml")
    assert (found.config["zero"], found.config.get("offload", "none")) == (1, "none")
    assert any("stage, " in note and "has no effect beside it" in note for note in found.notes) and not found.unread


def test_a_file_of_deepspeed_may_have_any_ending(folder):
    (folder / "ds.conf").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    command = "accelerate launch --use_deepspeed --num_processes 8 --deepspeed_config_file ds.conf t.py"
    assert read(command).config["zero"] == 3
    (folder / "ds.conf").unlink()
    with pytest.raises(UsageError, match="the file ds.conf of deepspeed_config_file is not there"):
        read(command)
    named = read(command.replace("ds.conf", "configs/stage3_no_offloading_accelerate.conf"))
    assert (named.config["zero"], named.config.get("offload", "none")) == (3, "none")


@pytest.mark.parametrize(
    ("engine", "options", "refused"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, "--bf16", ["train_micro_batch_size_per_gpu = 2"]),
        ({"gradient_accumulation_steps": 4}, "--bf16 --gradient_accumulation_steps 4", []),
        ({"train_batch_size": 64}, "--bf16", []),
        ({"train_batch_size": 32}, "--bf16", ["train_batch_size = 32"]),
        ({"bf16": {"enabled": True}}, "", ["bf16.enabled = True"]),
        ({"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}, "", []),
    ],
)
def test_settings_of_the_engine_that_the_trainer_refuses_are_named(folder, engine, options, refused):
    """transformers compares DeepSpeed's file with its own arguments, of which 8 samples and 1 micro-batch are the defaults."""
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **engine}))
    found = read(f"torchrun --nproc-per-node 8 run_clm.py --config_name gpt2 --deepspeed ds.json {options}")
    notes = [note for note in found.notes if "the Trainer refuses it" in note]
    assert len(notes) == len(refused) and all(note.startswith(text) for note, text in zip(notes, refused))
