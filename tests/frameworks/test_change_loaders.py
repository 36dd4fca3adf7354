"""Changes that `redline check` proposes are lines that the trainers' own parsers take, with the effect that they are to have."""

import json
import shlex
import subprocess
import sys

import pytest
import yaml
from redline.frameworks import read
from redline.frameworks.framework import file_keys, settings_of
from without_triton import WITHOUT_TRITON

pytestmark = pytest.mark.slow
TITAN = settings_of("torchtitan")


def changed(path, wanted, devices=8):
    """The document of a file with the lines of a change; fails unless they are read back as what is wanted."""
    trainer = read(path)
    trainer = trainer.beside({} if "micro_batch" in trainer.config else {"micro_batch": 2}, None).on(devices)
    edit = trainer.changed({**trainer.config, **wanted})
    assert edit is not None, wanted
    lines, again = edit
    assert lines and {knob: getattr(again.strategy(), knob) for knob in wanted} == wanted
    document = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
    for line in lines:
        if line.where == str(path):
            merge(
                document,
                json.loads(f"{{{line.text}}}") if path.suffix == ".json" else yaml.safe_load(f"{{{line.text}}}"),
            )
    return document


def merge(document, further):
    for key, value in further.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            merge(document[key], value)
        else:
            document[key] = value


def written(path, document):
    path.write_text(json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document))
    return path


def options_of(command, wanted, devices=8):
    """Words of a change of a command, and those that it removes."""
    trainer = read(command).on(devices)
    edit = trainer.changed({**trainer.config, **wanted})
    assert edit is not None, wanted
    removed = {line.text.removeprefix("without ") for line in edit[0] if line.new is None}
    return [word for line in edit[0] if line.new is not None for word in shlex.split(line.text)], removed


# -- accelerate -----------------------------------------------------------------------------------------------

REPLICAS = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_machines": 1,
    "num_processes": 8,
}  # fmt: skip
SHARDED = REPLICAS | {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
    },
}
ENGINE = REPLICAS | {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"},
}
SHAPED = SHARDED | {
    "parallelism_config": {
        f"parallelism_config_{name}_size": size for name, size in (("dp_shard", 4), ("tp", 1), ("cp", 2))
    }
}


@pytest.mark.parametrize(
    ("document", "wanted", "expected"),
    [
        (REPLICAS, {"zero": 3}, {"use_fsdp": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
        (REPLICAS, {"zero": 2, "checkpoint_ratio": 1}, {"use_fsdp": True, "fsdp_activation_checkpointing": True}),
        (REPLICAS, {"fusion": True}, {"dynamo_backend": "INDUCTOR"}),
        (SHARDED, {"zero": 2, "offload": "optimizer"}, {"fsdp_reshard_after_forward": False, "fsdp_offload_params": True}),
        (SHARDED, {"zero": 0}, {"use_fsdp": False, "multi_gpu": True}),
        (ENGINE, {"zero": 2, "offload": "none"}, {"zero_stage": 2, "offload_optimizer_device": "none"}),
        (ENGINE, {"micro_batch": 1, "grad_accum": 2}, {"gradient_accumulation_steps": 2}),
        (SHAPED, {"cp": 4, "dp": 2}, {"parallelism_config_cp_size": 4, "parallelism_config_dp_shard_size": 2}),
    ],
)  # fmt: skip
def test_accelerate_takes_changes_of_its_file(document, wanted, expected, tmp_path):
    launch = pytest.importorskip("accelerate.commands.launch")
    path = written(tmp_path / "config.yaml", document)
    written(path, changed(path, wanted))
    arguments, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    )
    assert {name: getattr(arguments, name) for name in expected} == expected
    if arguments.use_parallelism_config:
        from accelerate import ParallelismConfig
        from accelerate.commands.config.config_args import load_config_from_file

        sizes = load_config_from_file(str(path)).parallelism_config
        made = ParallelismConfig(**{name.removeprefix("parallelism_config_"): size for name, size in sizes.items()})
        assert made.total_size == arguments.num_processes


def test_accelerate_takes_changes_of_its_options():
    launch = pytest.importorskip("accelerate.commands.launch")
    words = ["--multi_gpu", "--num_processes", "8", "--num_machines", "1", "--mixed_precision", "bf16"]
    further, removed = options_of(["accelerate", "launch", *words, "train.py"], {"zero": 3, "offload": "optimizer"})
    words = [word for word in words if word not in removed]
    arguments, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*words, *further, "train.py"])
    )
    assert (
        arguments.use_fsdp and not arguments.multi_gpu and arguments.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    )
    assert str(arguments.fsdp_offload_params).lower() == "true"


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        (ENGINE, {"checkpoint_ratio": 1}),
        (REPLICAS, {"checkpoint_ratio": 1}),
        (REPLICAS, {"grad_accum": 4, "micro_batch": 1}),
    ],
)
def test_nothing_is_proposed_that_accelerate_ignores_or_refuses(document, wanted, tmp_path):
    trainer = read(written(tmp_path / "config.yaml", document))
    trainer = trainer.beside({"micro_batch": 4}, None).on(8)
    assert trainer.changed({**trainer.config, **wanted}) is None


def test_the_keys_of_accelerates_file_are_those_of_its_class():
    cluster = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    assert set(file_keys("accelerate")) == set(cluster.__dataclass_fields__)


# -- arguments of transformers.Trainer and what builds on them ------------------------------------------------

ARGUMENTS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True,
    "optim": "adamw_torch", "output_dir": "out",
}  # fmt: skip
WANTED = {"micro_batch": 2, "grad_accum": 4, "checkpoint_ratio": 0, "fusion": True}


def check_arguments(made):
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (2, 4)
    assert (made.gradient_checkpointing, made.torch_compile) == (False, True)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_transformers_takes_changes_of_its_arguments(zero, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    path = written(tmp_path / "args.yaml", ARGUMENTS)
    (made,) = parser.parse_dict({**changed(path, {**WANTED, "zero": zero}), "use_cpu": True})
    check_arguments(made)
    assert bool(made.fsdp) is (zero > 0)
    assert not zero or made.fsdp_config["reshard_after_forward"] is (zero == 3)
    words = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    further, _ = options_of(["python", "run_clm.py", *words], {**WANTED, "zero": zero})
    (made,) = parser.parse_args_into_dataclasses([*words, *further, "--use_cpu", "true"])
    check_arguments(made)
    assert bool(made.fsdp) is (zero > 0)


def test_trl_takes_changes_of_its_file(tmp_path):
    import trl

    path = written(
        tmp_path / "sft.yaml", ARGUMENTS | {"model_name_or_path": "gpt2", "use_peft": True, "max_length": 512}
    )
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    document = {**changed(path, WANTED), "use_cpu": True, "dataset_name": "x"}
    _, made, model = parser.parse_args_and_config(["--config", str(written(tmp_path / "new.yaml", document))])
    check_arguments(made)
    assert model.use_peft and made.max_length == 512


FACTORY = ARGUMENTS | {"model_name_or_path": "gpt2", "stage": "sft", "do_train": True, "dataset": "x", "template": "default",
                       "finetuning_type": "full", "cutoff_len": 512}  # fmt: skip
IN_FACTORY = {**WANTED, "checkpoint_ratio": 0}


def factory(monkeypatch, tmp_path, words):
    """LLaMA-Factory's arguments of a command's words."""
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    from llamafactory.hparams import parser

    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", *words])
    return parser._parse_train_args()


def test_llamafactory_takes_changes_of_its_file_and_of_its_command(tmp_path, monkeypatch):
    base = {name: value for name, value in FACTORY.items() if name != "gradient_checkpointing"} | {"use_cpu": True}
    path = written(tmp_path / "sft.yaml", base)
    new = written(tmp_path / "new.yaml", changed(path, IN_FACTORY))
    flags = [word for name, value in base.items() for word in (f"--{name}", str(value))]
    further, _ = options_of(["llamafactory-cli", "train", *flags], IN_FACTORY)
    for words in ([str(new)], [*flags, *further]):
        model, _, made, _, _ = factory(monkeypatch, tmp_path, words)
        assert (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.torch_compile) == (2, 4, True)
        assert model.disable_gradient_checkpointing is True


AXOLOTL = {
    "base_model": "gpt2", "datasets": [{"path": "x", "type": "alpaca"}], "sequence_len": 512, "sample_packing": True,
    "micro_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": "auto", "gradient_checkpointing": True,
    "learning_rate": 1e-4,
    "optimizer": "adamw_torch_fused", "attn_implementation": "flash_attention_2", "num_epochs": 1,
}  # fmt: skip


@pytest.mark.parametrize("plugins", [None, ["axolotl.integrations.spectrum.SpectrumPlugin"]])
def test_axolotl_takes_changes_of_its_file(plugins, tmp_path):
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.schemas.config import AxolotlInputConfig

    path = written(tmp_path / "a.yaml", AXOLOTL | ({"plugins": plugins} if plugins else {}))
    document = changed(
        path, {"micro_batch": 2, "grad_accum": 4, "checkpoint_ratio": 0, "fusion": True, "kernels": True}
    )
    made = type("WithLiger", (AxolotlInputConfig, LigerArgs), {})(**document)
    assert (made.micro_batch_size, made.gradient_accumulation_steps, made.torch_compile) == (2, 4, True)
    assert made.gradient_checkpointing is False
    assert made.liger_fused_linear_cross_entropy is True
    assert document["plugins"] == [*(plugins or []), "axolotl.integrations.liger.LigerPlugin"]


def test_litgpt_takes_changes_of_its_file(tmp_path):
    from jsonargparse import ArgumentParser
    from litgpt.finetune.full import setup

    base = {"checkpoint_dir": "checkpoints/a/b", "devices": 4, "precision": "bf16-true",
            "train": {"micro_batch_size": 4, "global_batch_size": 64, "max_seq_length": 512, "epochs": 1}}  # fmt: skip
    path = written(tmp_path / "full.yaml", base)
    document = changed(path, {"micro_batch": 8, "grad_accum": 2, "precision": "bf16"}, devices=4)
    parser = ArgumentParser()
    parser.add_function_arguments(setup)
    made = parser.parse_object(document)
    assert (made.train.micro_batch_size, made.train.global_batch_size, made.precision) == (8, 64, "bf16-mixed")


# -- DeepSpeed, Lightning, torchtitan -------------------------------------------------------------------------


def test_deepspeed_takes_changes_of_its_file(tmp_path, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)  # no process group here: the size is the one given
    path = written(
        tmp_path / "ds.json",
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 64, "bf16": {"enabled": True},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    )  # fmt: skip
    document = changed(path, {"micro_batch": 8, "grad_accum": 1, "zero": 2, "offload": "none"})

    class Ranks:
        get_data_parallel_world_size = staticmethod(lambda: 8)

    made = config.DeepSpeedConfig(document, mpu=Ranks())
    assert (made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps) == (8, 1)
    assert int(made.zero_config.stage) == 2 and str(made.zero_config.offload_optimizer.device).endswith("none")


def test_torchtitan_takes_changes_of_its_command(tmp_path):
    pytest.importorskip("torchtitan")
    words = ["--module", "llama3", "--config", "llama3_8b"]
    wanted = {"tp": 2, "dp": 4, "checkpoint_ratio": 1, "fusion": True, "sequence_parallel": True, "zero": 2}
    further, _ = options_of(["torchrun", "--nproc-per-node", "8", "-m", "torchtitan.train", *words], wanted)
    subcommands = [word for word in further if word.startswith("activation_checkpoint:")]
    flags = [word for word in further if word not in subcommands]
    code = """
import json, sys
from torchtitan.config import ConfigManager
made = ConfigManager().parse_args(json.loads(sys.argv[1]))
print("RESULT", json.dumps([
    made.parallelism.tensor_parallel_degree, made.parallelism.enable_sequence_parallel, made.compile.enable,
    made.parallelism.fsdp_reshard_after_forward, type(made.activation_checkpoint).__qualname__]))
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + code, json.dumps([*words, *flags, *subcommands])],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    assert json.loads(line.removeprefix("RESULT ")) == [2, True, True, "never", "FullAC.Config"]


def test_lightning_takes_changes_of_its_file(tmp_path):
    pytest.importorskip("lightning")
    from jsonargparse import ArgumentParser
    from lightning.pytorch import Trainer

    path = written(
        tmp_path / "fit.yaml",
        {"seed_everything": 1, "trainer": {"accelerator": "cpu", "devices": 8, "strategy": "ddp", "precision": "32-true",
                                           "accumulate_grad_batches": 1}},
    )  # fmt: skip
    document = changed(path, {"precision": "bf16", "zero": 2, "micro_batch": 1, "grad_accum": 2})
    parser = ArgumentParser()
    parser.add_class_arguments(Trainer, "trainer")
    made = parser.parse_object({"trainer": document["trainer"]}).trainer
    assert (made.precision, made.accumulate_grad_batches, made.strategy) == ("bf16-mixed", 2, "fsdp")


def test_torchtitans_configurations_are_those_of_its_registry(tmp_path):
    pytest.importorskip("torchtitan")
    code = """
import json, sys
from torchtitan.config import ConfigManager
for name in json.loads(sys.argv[1]):
    module = next(module for module in ("llama3", "qwen3", "deepseek_v3", "gpt_oss") if name.startswith(module))
    made = ConfigManager().parse_args(["--module", module, "--config", name])
    parallel = made.parallelism
    assert (parallel.pipeline_parallel_degree, parallel.context_parallel_degree) == (1, 1)
    print("RESULT", json.dumps([name, [
        made.training.local_batch_size, made.training.seq_len, parallel.tensor_parallel_degree,
        type(made.activation_checkpoint).__qualname__.partition("AC")[0].lower(), parallel.expert_parallel_degree,
        made.compile.enable and "model" in made.compile.components]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + code, json.dumps(list(TITAN["configs"]))],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    expected = {
        name: [
            settings["training.local_batch_size"],
            settings["training.seq_len"],
            settings.get("parallelism.tensor_parallel_degree", 1),
            settings["activation_checkpoint.mode"],
            TITAN["expert_configs"].get(name, {}).get("parallelism.expert_parallel_degree", 1),
            False,
        ]
        for name, settings in TITAN["configs"].items()
    }
    assert dict(map(json.loads, lines)) == {name: list(values) for name, values in expected.items()}, done.stderr[
        -2000:
    ]
