"""Exports are read by the frameworks' own loaders."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from redline.results import Measurement, Status, Trial
from redline.results.export import render

DOCUMENT = {
    "asked": {
        "model": "llama3-8b",
        "workload": {"id": "3f2a", "spec": "llama3-8b"},
        "seq_len": 128,
        "global_batch": 32,
        "devices": {"type": "cuda", "used": 4},
    }
}
CONFIGURATIONS = {
    "one device": {"micro_batch": 8, "grad_accum": 4, "precision": "fp32", "checkpoint_ratio": 0.5},
    "ddp": {"micro_batch": 4, "grad_accum": 2, "dp": 4, "zero": 0, "precision": "bf16", "fusion": True},
    "zero 2": {"micro_batch": 4, "grad_accum": 2, "dp": 4, "zero": 2, "precision": "bf16", "checkpoint_ratio": 1.0},
    "zero 3, offload": {"micro_batch": 2, "grad_accum": 4, "dp": 4, "zero": 3, "offload": "optimizer"},
    "tp and dp": {"micro_batch": 4, "grad_accum": 4, "tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "tp, pp, dp": {
        "micro_batch": 4, "grad_accum": 4, "tp": 2, "pp": 2, "dp": 2, "zero": 1, "precision": "bf16_pure",
        "fused_optimizer": True, "pipeline_schedule": "gpipe",
    },
}  # fmt: skip
every_configuration = pytest.mark.parametrize("name", CONFIGURATIONS)


def export(target, name, path, form=None, device="cuda"):
    config = CONFIGURATIONS[name]
    devices = config.get("tp", 1) * config.get("pp", 1) * config.get("dp", 1)
    measured = Measurement(status=Status.OK, throughput=10.0, unit="tokens/s", devices=devices)
    asked = {**DOCUMENT["asked"], "devices": {"type": device, "used": devices}}
    made = render(target, Trial(number=0, config=config, measurement=measured), {"asked": asked}, form=form)
    path.write_text(made.text)
    return config


@every_configuration
def test_accelerate_loads_its_config(name, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = tmp_path / "config.yaml"
    config = export("accelerate", name, path)
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes == config.get("tp", 1) * config.get("dp", 1)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    sharded = config.get("dp", 1) > 1 and (config.get("zero", 0) > 0 or config.get("tp", 1) > 1)
    assert arguments.use_fsdp is sharded
    assert arguments.mixed_precision == ("bf16" if config.get("precision") == "bf16" else "no")
    if sharded:
        assert arguments.fsdp_version == 2
        assert arguments.fsdp_reshard_after_forward is (config["zero"] == 3)
        assert arguments.fsdp_activation_checkpointing is (config.get("checkpoint_ratio", 0) > 0)
    if config.get("fusion"):
        assert arguments.dynamo_backend.lower() == "inductor" and arguments.dynamo_use_regional_compilation
    if config.get("tp", 1) > 1:
        from accelerate import ParallelismConfig

        sizes = {
            key.removeprefix("parallelism_config_"): size for key, size in loaded.parallelism_config.items()
        }
        assert ParallelismConfig(**sizes).total_size == loaded.num_processes


@pytest.mark.parametrize("form", ["yaml", "json"])
@every_configuration
def test_the_trainers_arguments_are_parsed(name, form, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import HfArgumentParser, TrainingArguments

    path = tmp_path / f"args.{form}"
    # A CPU's arguments, so that transformers does not refuse bf16 on this machine.
    config = export("trainer", name, path, form, device="cpu")
    parser = HfArgumentParser(TrainingArguments)
    (made,) = parser.parse_yaml_file(path) if form == "yaml" else parser.parse_json_file(path)
    assert made.per_device_train_batch_size == config["micro_batch"]
    assert made.gradient_accumulation_steps == config["grad_accum"]
    assert made.bf16 is (config.get("precision") == "bf16")
    assert made.torch_compile is config.get("fusion", False)
    assert bool(made.fsdp) is (config.get("zero", 0) > 0)
    if "fused_optimizer" in config:
        assert made.optim == "adamw_torch_fused"


@pytest.fixture(scope="module")
def deepspeed_reads(tmp_path_factory):
    """What DeepSpeed makes of every configuration's export: in one process, as it takes seconds to import."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    folder = tmp_path_factory.mktemp("deepspeed")
    code = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
import deepspeed.runtime.config as module
module.dist.get_rank = lambda: 0  # no process group here: the size is the one given

class Ranks:
    def __init__(self, size):
        self.size = size

    def get_data_parallel_world_size(self):
        return self.size

for name, (path, replicas) in json.loads(sys.argv[1]).items():
    made = DeepSpeedConfig(path, mpu=Ranks(replicas))
    print("RESULT", json.dumps([name, {
        "batch": [made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps],
        "world": made.world_size, "stage": int(made.zero_config.stage), "bf16": made.bfloat16_config.enabled,
        "offload": made.zero_config.offload_optimizer is not None and str(made.zero_config.offload_optimizer.device),
        "tp": made.tensor_parallel_config.autotp_size, "stages": made.pipeline["stages"],
    }]))
"""
    asked = {}
    for number, name in enumerate(CONFIGURATIONS):
        path = folder / f"{number}.json"
        asked[name] = [str(path), export("deepspeed", name, path).get("dp", 1)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [each.removeprefix("RESULT ") for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    return dict(map(json.loads, lines))


@every_configuration
def test_deepspeed_accepts_its_config(name, deepspeed_reads):
    config, made = CONFIGURATIONS[name], deepspeed_reads[name]
    micro, steps, replicas = config["micro_batch"], config["grad_accum"], config.get("dp", 1)
    assert made["world"] == replicas
    assert made["batch"] == [micro * steps * replicas, micro, steps]
    assert made["stage"] == config.get("zero", 0)
    assert made["bf16"] is (config.get("precision") in ("bf16", "bf16_pure"))
    assert bool(made["offload"]) is (config.get("offload") == "optimizer")
    assert made["tp"] == (config["tp"] if "tp" in config else 0)
    assert made["stages"] == config.get("pp", "auto")


@every_configuration
def test_torchtitan_parses_its_flags(name, tmp_path):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    tyro = pytest.importorskip("tyro")
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import (
        ActivationCheckpointingConfig,
        FullAC,
        SelectiveAC,
    )

    # The sections of torchtitan's Trainer.Config that are written; the trainer itself imports its data loaders.
    sections = {
        "training": (TrainingConfig, TrainingConfig),
        "parallelism": (ParallelismConfig, ParallelismConfig),
        "optimizer": (OptimizersContainer.Config, OptimizersContainer.Config),
        "compile": (CompileConfig, CompileConfig),
        "activation_checkpoint": (ActivationCheckpointingConfig, SelectiveAC.Config),
    }
    config_class = dataclasses.make_dataclass(
        "Config",
        [
            (key, kind, dataclasses.field(default_factory=default))
            for key, (kind, default) in sections.items()
        ],
        kw_only=True,
    )
    path = tmp_path / "titan.sh"
    config = export("torchtitan", name, path)
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    out = subprocess.run(
        ["bash", str(path)],
        env={**os.environ, "LAUNCH": str(launcher)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    given = out.split("\n")[:-1]
    assert given[:6] == ["-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_8b"]
    made = tyro.cli(config_class, args=given[6:])
    pipelined = config.get("pp", 1) > 1
    local = config["micro_batch"] * (config["grad_accum"] if pipelined else 1)
    assert made.training.local_batch_size == local
    assert made.training.global_batch_size == config["micro_batch"] * config["grad_accum"] * config.get(
        "dp", 1
    )
    assert made.parallelism.tensor_parallel_degree == config.get("tp", 1)
    assert made.parallelism.pipeline_parallel_degree == config.get("pp", 1)
    assert made.parallelism.pipeline_parallel_schedule == ("GPipe" if pipelined else "1F1B")
    degrees = made.parallelism
    assert degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree == config.get("dp", 1)
    if config.get("tp", 1) > 1:
        assert degrees.enable_sequence_parallel is config.get("sequence_parallel", False)
    assert made.compile.enable is config.get("fusion", False)
    checkpointed = config.get("checkpoint_ratio", 0) > 0
    assert isinstance(made.activation_checkpoint, FullAC.Config) is checkpointed
    assert (made.activation_checkpoint is None) is not checkpointed
    assert made.training.dtype == ("bfloat16" if config.get("precision") == "bf16_pure" else "float32")


MEGATRON_FLAGS = {
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--sequence-parallel": bool,
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--seq-length": int,
    "--use-distributed-optimizer": bool,
    "--use-megatron-fsdp": bool,
    "--data-parallel-sharding-strategy": str,
    "--no-gradient-accumulation-fusion": bool,
    "--ckpt-format": str,
    "--optimizer-cpu-offload": bool,
    "--use-precision-aware-optimizer": bool,
    "--bf16": bool,
    "--fp16": bool,
    "--fp8-format": str,
    "--recompute-granularity": str,
    "--recompute-method": str,
    "--recompute-num-layers": int,
    "--attention-backend": str,
}
"""Flags of megatron/training/arguments.py in Megatron-LM, which is on no package index, and their types."""


@every_configuration
def test_megatrons_flags_are_its_own(name, tmp_path):
    import argparse

    path = tmp_path / "megatron.sh"
    config = export("megatron", name, path)
    out = subprocess.run(
        ["bash", "-c", f'source "{path}"; printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'],
        env={**os.environ, "NUM_LAYERS": "8"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag, kind in MEGATRON_FLAGS.items():
        parser.add_argument(flag, **({"action": "store_true"} if kind is bool else {"type": kind}))
    made = parser.parse_args(out.split("\n")[:-1])
    replicas = config.get("dp", 1)
    assert made.micro_batch_size == config["micro_batch"]
    assert made.global_batch_size == config["micro_batch"] * config["grad_accum"] * replicas
    assert made.tensor_model_parallel_size == config.get("tp", 1)
    assert made.bf16 is (config.get("precision") in ("bf16", "bf16_pure"))
    assert made.use_megatron_fsdp is (config.get("zero", 0) >= 2)
    assert made.recompute_num_layers == {0: None, 0.5: 4, 1.0: 1}[config.get("checkpoint_ratio", 0)]
