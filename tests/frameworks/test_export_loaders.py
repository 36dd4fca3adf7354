"""The frameworks' own loaders read the exports."""

import argparse
import ast
import configparser
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path

import pytest
import redline
import yaml
from numerics_table import FAMILIES, tiny
from redline.frameworks import export_targets, read, render
from redline.frameworks.common import ADAMW
from redline.frameworks.torchtitan import PRESETS as TORCHTITAN_PRESETS
from redline.frameworks.trainer import AVERAGING
from redline.models import workload
from redline.models.architecture import shape_of
from redline.models.presets import PRESETS, ServerModel
from redline.models.skeleton import skeleton
from redline.results import Measurement, Status, Trial
from without_triton import WITHOUT_TRITON

pytestmark = pytest.mark.slow

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
    "hsdp": {"micro_batch": 2, "grad_accum": 4, "dp": 4, "zero": 3, "hsdp": 2, "precision": "bf16"},
    "tp and dp": {"micro_batch": 4, "grad_accum": 4, "tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "sp": {"micro_batch": 4, "grad_accum": 4, "sp": 2, "dp": 2, "zero": 3, "precision": "bf16"},
    "cp": {"micro_batch": 4, "grad_accum": 4, "cp": 2, "dp": 2, "zero": 1, "precision": "bf16"},
    "tp, pp, dp": {
        "micro_batch": 4, "grad_accum": 4, "tp": 2, "pp": 2, "dp": 2, "zero": 1, "precision": "bf16_pure",
        "fused_optimizer": True, "pipeline_schedule": "gpipe",
    },
    "pp, bf16_pure": {
        "micro_batch": 4, "grad_accum": 4, "pp": 2, "dp": 2, "zero": 1, "precision": "bf16_pure",
        "fusion": True,
    },
    "pp, interleaved": {
        "micro_batch": 4, "grad_accum": 4, "pp": 2, "dp": 2, "zero": 1, "precision": "bf16",
        "pipeline_schedule": "interleaved", "virtual_stages": 2,
    },
}  # fmt: skip
every_configuration = pytest.mark.parametrize("name", CONFIGURATIONS)
CHECKED = {name: target.checked for name, target in export_targets().items() if target.checked is not None}


@pytest.mark.parametrize("target", CHECKED)
def test_an_export_names_the_version_it_is_checked_against_here(target):
    package, version = CHECKED[target]
    assert f"Checked against {package} {version}\n" in render(
        target, Trial(number=0, config={}), DOCUMENT
    ).text.replace('",', "\n")
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert installed.split(".")[:2] == version.split("."), f"raise CHECKED of {target}, once its tests pass"


@pytest.mark.parametrize("target", CHECKED)
def test_the_version_is_that_of_the_extra_and_of_the_documentation(target):
    package, version = CHECKED[target]
    root = Path(redline.__file__).parent
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    pins = [line.partition(";")[0].strip() for line in settings["options.extras_require"]["frameworks"].splitlines()]
    assert f"{package}=={version}.*" in pins
    page = (root / "docs" / "exports.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith(f"| `{target}` |")]
    assert any(f"| {package} {version} |" in row for row in rows), rows


def export(target, name, path, form=None, device="cuda"):
    config = CONFIGURATIONS[name]
    devices = prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))
    measured = Measurement(status=Status.OK, throughput=10.0, unit="tokens/s", devices=devices)
    asked = {**DOCUMENT["asked"], "devices": {"type": device, "used": devices}}
    made = render(target, Trial(number=0, config=config, measurement=measured), {"asked": asked}, form=form)
    path.write_text(made.text)
    return config


def results(code, asked, folder):
    """Runs code in a separate process, as imports take seconds. Returns what it prints for each entry of `asked`."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [each.removeprefix("RESULT ") for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    return dict(map(json.loads, lines))


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
    if config.get("tp", 1) > 1 or config.get("hsdp", 1) > 1:
        from accelerate import ParallelismConfig

        sizes = {key.removeprefix("parallelism_config_"): size for key, size in loaded.parallelism_config.items()}
        made = ParallelismConfig(**sizes)
        assert made.total_size == loaded.num_processes
        assert made.dp_replicate_size == config.get("hsdp", 1)


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_accelerate_converts_by_torchao(precision, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.dataclasses import FP8BackendType
    from accelerate.utils.launch import setup_fp8_env

    trial = Trial(number=0, config={"micro_batch": 1, "precision": precision}, measurement=None)
    made = render("accelerate", trial, DOCUMENT)
    path = tmp_path / "config.yaml"
    path.write_text(made.text)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.mixed_precision == "fp8"
    environment = setup_fp8_env(arguments, {})
    assert FP8BackendType(environment["ACCELERATE_FP8_BACKEND"]) == FP8BackendType.AO
    assert environment["ACCELERATE_FP8_PAD_INNER_DIM"] == "True"
    assert environment["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] == "False"
    assert ("from_recipe_name('rowwise')" in " ".join(made.notes)) is (precision == "fp8_rowwise")


def test_accelerate_launches_on_the_hosts_there_are(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "config.yaml"
    asked = {**DOCUMENT["asked"], "devices": {"type": "cuda", "used": 64, "per_host": 8}}
    config = {"micro_batch": 1, "grad_accum": 1, "dp": 64, "zero": 3, "precision": "bf16"}
    made = render("accelerate", Trial(number=0, config=config, measurement=None), {"asked": asked}, file=str(path))
    path.write_text(made.text)
    loaded = load_config_from_file(str(path))
    assert (loaded.num_machines, loaded.num_processes, loaded.main_process_ip) == (8, 64, "FIRST-HOST")
    line = made.use[1].replace("$NODE_RANK", "3").replace("$MASTER_ADDR", "n1").replace("${MASTER_PORT:-29500}", "4321")
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("accelerate", "launch")
    given, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    prepare_multi_gpu_env(given)  # sets the arguments that torchrun is started with
    assert (given.nnodes, given.nproc_per_node, given.node_rank) == ("8", "8", 3)
    assert (given.rdzv_backend, given.rdzv_endpoint) == ("static", "n1:4321")


def test_on_a_cpu_accelerate_reads_its_file_for_every_rank(tmp_path):
    """The script's environment keeps the rendezvous address and port that torchrun set."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    path = tmp_path / "config.yaml"
    asked = {**DOCUMENT["asked"], "devices": {"type": "cpu", "used": 2, "per_host": 2}}
    trial = Trial(number=0, config={"micro_batch": 1, "dp": 2, "precision": "bf16"}, measurement=None)
    made = render("accelerate", trial, {"asked": asked}, file=str(path))
    path.write_text(made.text)
    arguments = shlex.split(made.use[-1].removeprefix("Start: "))
    assert arguments.pop(0) == "OMP_WAIT_POLICY=PASSIVE"
    assert arguments[:6] == ["torchrun", "--nproc-per-node", "2", "--no-python", "accelerate", "launch"]
    given, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments[6:]))
    assert not (given.multi_gpu or given.use_fsdp or given.use_deepspeed)
    command, environment = prepare_simple_launcher_cmd_env(given)
    assert command[-1] == "train.py"
    assert (environment["ACCELERATE_USE_CPU"], environment["ACCELERATE_MIXED_PRECISION"]) == ("True", "bf16")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert environment.get(name) == os.environ.get(name)


@pytest.mark.parametrize("target", ["accelerate", "trainer"])
def test_replicas_are_whole_on_a_cpu_where_accelerate_has_no_fsdp(target):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    asked = {**DOCUMENT["asked"], "devices": {"type": "cpu", "used": 2}}
    trial = Trial(number=0, config={"micro_batch": 1, "dp": 2, "zero": 3}, measurement=None)
    made = render(target, trial, {"asked": asked})
    assert "fsdp" not in "".join(line for line in made.text.splitlines() if not line.startswith("#")).lower()
    assert "accelerate has no FSDP on a CPU" in " ".join(made.notes)


@pytest.fixture(scope="module")
def lightning_reads(tmp_path_factory):
    """Every configuration's export as LightningCLI parses it."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    folder = tmp_path_factory.mktemp("lightning")
    code = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

class CLI(LightningCLI):
    def instantiate_trainer(self, **kwargs):
        made.append(self.config_init["trainer"])
        # One with these arguments would look for devices that there are none of here.
        return Trainer(accelerator="cpu", devices=1, logger=False)

for name, path in json.loads(sys.argv[1]).items():
    made = []
    cli = CLI(Module, run=False, save_config_callback=None, args=["--config", path])
    given = cli.config.get("optimizer")
    strategy = made[0]["strategy"]
    print("RESULT", json.dumps([name, {
        **{key: made[0][key] for key in ("devices", "num_nodes", "precision", "accumulate_grad_batches")},
        "strategy": strategy if isinstance(strategy, str) else type(strategy).__name__,
        "sizes": [getattr(strategy, key, None) for key in ("_data_parallel_size", "_tensor_parallel_size")],
        "optimizer": given and [given["class_path"], dict(given["init_args"])],
    }]))
"""
    asked = {}
    for number, name in enumerate(CONFIGURATIONS):
        export("lightning", name, folder / f"{number}.yaml")
        asked[name] = str(folder / f"{number}.yaml")
    return results(code, asked, folder)


@every_configuration
def test_lightnings_cli_takes_its_file(name, lightning_reads):
    config, made = CONFIGURATIONS[name], lightning_reads[name]
    tp, replicas = config.get("tp", 1), config.get("dp", 1)
    assert made["accumulate_grad_batches"] == config["grad_accum"]
    assert made["devices"] * made["num_nodes"] == tp * replicas
    precision = {"fp32": "32-true", "bf16": "bf16-mixed", "bf16_pure": "bf16-true"}
    assert made["precision"] == precision[config.get("precision", "fp32")]
    sharded = tp > 1 or (replicas > 1 and config.get("zero", 0) > 0)
    assert made["strategy"] == ("ModelParallelStrategy" if sharded else "ddp" if replicas > 1 else "auto")
    if sharded:
        assert made["sizes"] == [replicas, tp]
        # An optimizer here would be created before the weights are sharded, and would train none of them.
        assert made["optimizer"] is None
        return
    kind, settings = made["optimizer"]
    assert kind == "torch.optim.AdamW"
    assert {key: settings[key] for key in ADAMW} == dict(ADAMW)
    assert bool(settings["fused"]) is config.get("fused_optimizer", False)


def test_the_optimizer_of_an_export_is_the_one_that_trials_have():
    import torch

    weights = [torch.nn.Parameter(torch.zeros(1))]
    (group,) = workload("llama-tiny").make_optimizer(weights, fused=False).param_groups
    assert {name: list(group[name]) if name == "betas" else group[name] for name in ADAMW} == dict(ADAMW)


def test_the_trainer_is_told_of_models_that_average_their_loss_themselves():
    """Such models' `forward` takes any keyword and passes none to a loss function."""
    found = {}
    for family in FAMILIES:
        if family == "wide_resnet":
            continue
        architecture = tiny(family).model
        source = inspect.getsource(architecture.model_class.forward)
        assert "**kwargs" in source.partition("->")[0]
        found[family] = "self.loss_function(" not in source
        shape = shape_of(architecture)
        if shape is not None:
            config = {"micro_batch": 1, "grad_accum": 2, "dp": 2}
            trial = Trial(number=0, config=config, measurement=None)
            notes = render("trainer", trial, {"asked": {"shape": shape}}).notes
            assert any("accepts_loss_kwargs = False" in note for note in notes) is found[family], family
    assert {family for family, itself in found.items() if itself} == set(AVERAGING)


@pytest.mark.parametrize("form", ["yaml", "json"])
@every_configuration
def test_the_trainers_arguments_are_parsed(name, form, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import HfArgumentParser, TrainingArguments

    path = tmp_path / f"args.{form}"
    config = export("trainer", name, path, form)
    # Otherwise transformers refuses bf16 on this machine.
    read, write = (json.loads, json.dumps) if form == "json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(write({**read(path.read_text()), "use_cpu": True}))
    parser = HfArgumentParser(TrainingArguments)
    (made,) = parser.parse_yaml_file(path) if form == "yaml" else parser.parse_json_file(path)
    assert made.per_device_train_batch_size == config["micro_batch"]
    assert made.gradient_accumulation_steps == config["grad_accum"]
    assert made.bf16 is (config.get("precision") == "bf16")
    assert made.torch_compile is config.get("fusion", False)
    assert bool(made.fsdp) is (config.get("zero", 0) > 0)
    if "fused_optimizer" in config:
        assert made.optim == "adamw_torch_fused"
    assert (made.learning_rate, made.lr_scheduler_type) == (ADAMW["lr"], "constant")
    assert [made.adam_beta1, made.adam_beta2] == ADAMW["betas"] and made.adam_epsilon == ADAMW["eps"]
    assert (made.weight_decay, made.max_grad_norm) == (ADAMW["weight_decay"], 0.0)
    assert made.logging_nan_inf_filter is False


@pytest.fixture(scope="module")
def deepspeed_reads(tmp_path_factory):
    """Every configuration's export as DeepSpeed parses it."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    folder = tmp_path_factory.mktemp("deepspeed")
    code = """
import json, sys
from deepspeed.launcher.runner import parse_args
from deepspeed.runtime.config import DeepSpeedConfig
import deepspeed.runtime.config as module
module.dist.get_rank = lambda: 0  # no process group here: the size is the one given

class Ranks:
    def __init__(self, size):
        self.size = size

    def get_data_parallel_world_size(self):
        return self.size

for name, (path, replicas, started) in json.loads(sys.argv[1]).items():
    made = DeepSpeedConfig(path, mpu=Ranks(replicas))
    launched = parse_args(started)
    print("RESULT", json.dumps([name, {
        "batch": [made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps],
        "world": made.world_size, "stage": int(made.zero_config.stage), "bf16": made.bfloat16_config.enabled,
        "offload": made.zero_config.offload_optimizer is not None and str(made.zero_config.offload_optimizer.device),
        "tp": made.tensor_parallel_config.autotp_size, "stages": made.pipeline["stages"],
        "clipping": made.gradient_clipping, "timers": made.timers_config.enabled,
        "optimizer": [made.optimizer_name, made.optimizer_params],
        "gpus": launched.num_gpus, "script": [launched.user_script, *launched.user_args],
    }]))
"""
    asked = {}
    for number, name in enumerate(CONFIGURATIONS):
        path = folder / f"{number}.json"
        if name != "tp, pp, dp":  # DeepSpeed's export refuses it
            config = export("deepspeed", name, path)
            (start,) = (
                line for line in json.loads(path.read_text())["_comment"] if line.startswith("Start: deepspeed ")
            )
            asked[name] = [str(path), config.get("dp", 1), start.split()[2:]]
    return results(code, asked, folder)


@pytest.mark.parametrize("name", sorted(set(CONFIGURATIONS) - {"tp, pp, dp"}))
def test_deepspeed_accepts_its_config(name, deepspeed_reads):
    config, made = CONFIGURATIONS[name], deepspeed_reads[name]
    micro, steps, replicas = config["micro_batch"], config["grad_accum"], config.get("dp", 1)
    assert made["world"] == replicas
    assert made["batch"] == [micro * steps * replicas, micro, steps]
    assert made["stage"] == config.get("zero", 0)
    assert made["bf16"] is (config.get("precision") in ("bf16", "bf16_pure"))
    assert bool(made["offload"]) is (config.get("offload") == "optimizer")
    assert made["tp"] == (config.get("tp", 0))
    assert made["stages"] == config.get("pp", "auto")
    assert (made["clipping"], made["timers"]) == (0.0, False)
    kind, settings = made["optimizer"]
    offload = config.get("offload") == "optimizer"
    assert kind == "adamw" and {name: settings[name] for name in ADAMW} == dict(ADAMW)
    assert settings.get("torch_adam", False) is not offload
    assert settings.get("fused", False) is config.get("fused_optimizer", False)
    assert made["gpus"] == prod(config.get(name, 1) for name in ("tp", "sp", "pp", "dp"))
    assert made["script"] == ["train.py", "--deepspeed_config", "deepspeed.json"]


@every_configuration
def test_deepspeed_knows_every_key_of_its_config(name, tmp_path):
    """DeepSpeed ignores unknown keys."""
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("deepspeed is not installed")
    if name == "tp, pp, dp":
        pytest.skip("which is refused")
    export("deepspeed", name, tmp_path / "config.json")
    given = json.loads((tmp_path / "config.json").read_text())
    assert given.pop("_comment")
    # The optimizers' parameters are compared in the tests above.
    given["optimizer"].pop("params")
    known = texts(Path(found.origin).parent / "runtime") | texts(Path(found.origin).parent / "utils")
    known |= texts(Path(found.origin).parent / "module_inject")
    assert keys(given) <= known
    assert not keys({"train_batch_sizes": 1}) <= known


def keys(given):
    """Keys of a mapping, including nested ones."""
    return set(given) | {each for value in given.values() if isinstance(value, dict) for each in keys(value)}


@cache
def sources(folder):
    return [ast.parse(path.read_text()) for path in Path(folder).rglob("*.py")]


def texts(folder):
    """Strings in a folder's sources, and names of its classes' fields."""
    found = set()
    for tree in sources(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def reads(folder, without=()):
    """(owner, name) of every attribute that a package's sources read, except in the given folders."""
    found = set()
    for path in Path(folder).rglob("*.py"):
        if path.relative_to(folder).parts[0] in without:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                found.add((getattr(owner, "attr", getattr(owner, "id", "")), node.attr))
    return found


READ_BY_TORCHTITAN = """
from torchtitan.config import ConfigManager

for name, arguments in json.loads(sys.argv[1]).items():
    made = ConfigManager().parse_args(arguments)
    print("RESULT", json.dumps([name, {
        **{key: getattr(made.training, key) for key in (
            "local_batch_size", "global_batch_size", "seq_len", "dtype", "mixed_precision_param", "steps",
            "enable_cpu_offload", "disable_cuda_graphs")},
        **{key: getattr(made.parallelism, key) for key in (
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
            "pipeline_parallel_degree", "pipeline_parallel_schedule", "enable_sequence_parallel",
            "pipeline_parallel_microbatch_size", "fsdp_reshard_after_forward")},
        "compile": made.compile.enable, "optimizer": made.optimizer.implementation,
        "recomputed": made.activation_checkpoint and type(made.activation_checkpoint).__qualname__,
    }]))
"""


@pytest.fixture(scope="module")
def torchtitan_reads(tmp_path_factory):
    """Every configuration's export with one more argument, as torchtitan's parser reads it."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    folder = tmp_path_factory.mktemp("torchtitan")
    asked = {}
    for number, name in enumerate(CONFIGURATIONS):
        path = folder / f"{number}.sh"
        export("torchtitan", name, path)
        out = subprocess.run(
            ["bash", str(path), "--training.steps", "7"],
            env={**os.environ, "LAUNCH": "printf %s\\n"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        module, train, *asked[name] = out.split("\n")[:-1]
        assert (module, train) == ("-m", "torchtitan.train")
    asked["qwen3"] = [*asked["ddp"]]
    asked["qwen3"][1:4:2] = TORCHTITAN_PRESETS["qwen3-0.6b"]
    return results(WITHOUT_TRITON + READ_BY_TORCHTITAN, asked, folder)


def test_torchtitan_reads_every_setting_that_an_export_writes():
    """The parser also accepts settings that no training reads."""
    found = importlib.util.find_spec("torchtitan")
    if found is None:
        pytest.skip("torchtitan is not installed")
    read = reads(Path(found.origin).parent, without=("config", "experiments"))
    settings = set()
    for name, config in CONFIGURATIONS.items():
        devices = prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))
        measured = Measurement(status=Status.OK, throughput=10.0, unit="tokens/s", devices=devices)
        text = render("torchtitan", Trial(number=0, config=config, measurement=measured), DOCUMENT).text
        settings |= set(re.findall(r"--(\w+\.\w+)", text))
        assert settings, name
    for setting in settings:
        section, _, field = setting.partition(".")
        owners = {section, f"{section}_config", "config"} - ({"config"} if field in ("dtype", "enable") else set())
        assert any((owner, field.removeprefix("no_")) in read for owner in owners), setting
    assert not any((owner, "mixed_precision_parameter") in read for owner in ("training", "config"))


@every_configuration
def test_torchtitan_parses_its_flags(name, torchtitan_reads):
    config, made = CONFIGURATIONS[name], torchtitan_reads[name]
    pipelined, precision = config.get("pp", 1) > 1, config.get("precision", "fp32")
    replicas, zero = config.get("dp", 1), config.get("zero", 0)
    assert made["steps"] == 7  # the script's own argument
    assert made["local_batch_size"] == config["micro_batch"] * (config["grad_accum"] if pipelined else 1)
    assert made["global_batch_size"] == config["micro_batch"] * config["grad_accum"] * replicas
    assert made["seq_len"] == 128
    assert made["tensor_parallel_degree"] == config.get("tp", 1)
    assert made["pipeline_parallel_degree"] == config.get("pp", 1)
    assert made["pipeline_parallel_microbatch_size"] == (config["micro_batch"] if pipelined else 1)
    assert made["pipeline_parallel_schedule"] == (
        {"gpipe": "GPipe", "interleaved": "Interleaved1F1B"}.get(config.get("pipeline_schedule"), "1F1B")
    )
    groups = config.get("hsdp", 1) if zero else replicas
    assert made["data_parallel_replicate_degree"] == groups
    assert made["data_parallel_shard_degree"] == replicas // groups
    if zero:
        assert made["fsdp_reshard_after_forward"] == ("always" if zero == 3 else "never")
    if config.get("tp", 1) > 1:
        assert made["enable_sequence_parallel"] is config.get("sequence_parallel", False)
    assert made["enable_cpu_offload"] is (config.get("offload") == "optimizer")
    assert made["disable_cuda_graphs"] is True
    assert made["compile"] is config.get("fusion", False)
    assert made["recomputed"] == ("FullAC.Config" if config.get("checkpoint_ratio", 0) > 0 else None)
    assert made["dtype"] == ("bfloat16" if precision == "bf16_pure" else "float32")
    assert made["mixed_precision_param"] == ("float32" if precision == "fp32" else "bfloat16")
    if "fused_optimizer" in config:
        assert made["optimizer"] == "fused"


MEGATRON_FLAGS = {
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--context-parallel-size": int,
    "--num-virtual-stages-per-pipeline-rank": int,
    "--sequence-parallel": bool,
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--seq-length": int,
    "--use-distributed-optimizer": bool,
    "--use-megatron-fsdp": bool,
    "--data-parallel-sharding-strategy": ("optim_grads", "optim_grads_params"),
    "--num-distributed-optimizer-instances": int,
    "--no-gradient-accumulation-fusion": bool,
    "--ckpt-format": ("torch_dist", "fsdp_dtensor"),
    "--optimizer-cpu-offload": bool,
    "--use-precision-aware-optimizer": bool,
    "--bf16": bool,
    "--fp16": bool,
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp8-recipe": ("delayed", "tensorwise", "mxfp8", "blockwise"),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-num-layers": int,
    "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "--num-layers": int,
    "--hidden-size": int,
    "--ffn-hidden-size": int,
    "--num-attention-heads": int,
    "--group-query-attention": bool,
    "--num-query-groups": int,
    "--kv-channels": int,
    "--max-position-embeddings": int,
    "--vocab-size": int,
    "--untie-embeddings-and-output-weights": bool,
    "--num-experts": int,
    "--moe-router-topk": int,
    "--moe-ffn-hidden-size": int,
    "--moe-shared-expert-intermediate-size": int,
    "--moe-layer-freq": str,
    "--moe-router-score-function": ("softmax", "sigmoid"),
    "--moe-router-enable-expert-bias": bool,
    "--multi-latent-attention": bool,
    "--q-lora-rank": int,
    "--kv-lora-rank": int,
    "--qk-head-dim": int,
    "--qk-pos-emb-head-dim": int,
    "--v-head-dim": int,
    "--expert-model-parallel-size": int,
    "--expert-tensor-parallel-size": int,
    "--moe-expert-capacity-factor": float,
    "--moe-pad-expert-input-to-capacity": bool,
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--norm-epsilon": float,
    "--position-embedding-type": ("learned_absolute", "rope"),
    "--rotary-base": int,
    "--rotary-percent": float,
    "--use-rope-scaling": bool,
    "--swiglu": bool,
    "--disable-bias-linear": bool,
    "--add-qkv-bias": bool,
    "--qk-layernorm": bool,
    "--window-size": str,
    "--hidden-dropout": float,
    "--attention-dropout": float,
    "--grad-reduce-in-bf16": bool,
}
"""Flags of megatron/training/arguments.py in megatron-core 0.19, with their types or choices: that parser
itself needs Python 3.12."""
MODELS = (
    "llama3-8b", "llama3.2-1b", "qwen2-7b", "qwen3-0.6b", "mistral-7b", "mixtral-8x7b", "gpt2",
    "gpt-neox-20b", "opt-350m", "bert-base", "deepseek-v3",
)  # fmt: skip


@cache
def architecture(model):
    """A preset's architecture, cached because it takes a second."""
    return workload(model).model


def megatron_arguments(model, name, seq_len=128):
    """The arguments that an export gives Megatron as bash passes them, and the variable that tp and cp need.

    `name` is the name of a configuration, or a configuration.
    """
    config = CONFIGURATIONS[name] if isinstance(name, str) else name
    devices = prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))
    asked = {**DOCUMENT["asked"], "model": model, "shape": shape_of(architecture(model)), "seq_len": seq_len}
    measured = Measurement(status=Status.OK, throughput=10.0, unit="tokens/s", devices=devices)
    made = render("megatron", Trial(number=0, config=config, measurement=measured), {"asked": asked})
    script = made.text + 'echo "${CUDA_DEVICE_MAX_CONNECTIONS:-}"; printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    out = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin"}
    ).stdout
    connections, *given = out.split("\n")[:-1]
    return given, connections


def parse(given):
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag, kind in MEGATRON_FLAGS.items():
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        parser.add_argument(flag, **({"action": "store_true"} if kind is bool else how))
    return parser.parse_args(given)


@every_configuration
def test_megatrons_flags_are_its_own(name):
    config = CONFIGURATIONS[name]
    given, connections = megatron_arguments("llama3-8b", name)
    made = parse(given)
    replicas = config.get("dp", 1)
    assert made.micro_batch_size == config["micro_batch"]
    assert made.global_batch_size == config["micro_batch"] * config["grad_accum"] * replicas
    assert made.tensor_model_parallel_size == config.get("tp", 1)
    assert made.bf16 is (config.get("precision") in ("bf16", "bf16_pure"))
    assert made.use_megatron_fsdp is (config.get("zero", 0) >= 2)
    assert made.num_distributed_optimizer_instances == (2 if name == "hsdp" else None)
    assert made.recompute_num_layers == {0: None, 0.5: 16, 1.0: 1}[config.get("checkpoint_ratio", 0)]
    assert made.context_parallel_size == config.get("cp")
    parallel = config.get("tp", 1) * config.get("cp", 1) > 1
    assert connections == ("1" if parallel and config.get("zero", 0) < 2 else "")


@pytest.mark.parametrize(
    ("present", "wanted"),
    [
        ("--tensor-model-parallel-size 4", {"tp": 2, "dp": 4, "micro_batch": 2, "grad_accum": 8}),
        ("--use-distributed-optimizer", {"zero": 3}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"checkpoint_ratio": 0}),
        ("--num-experts 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1", {"ep": 2, "etp": 0}),
        ("--pipeline-model-parallel-size 2", {"checkpoint_ratio": 0.5}),
    ],
)
def test_megatron_takes_changes_of_its_command(present, wanted):
    base = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 2048 --bf16 "
    words = f"{base}--micro-batch-size 1 --global-batch-size 64 {present}".split()
    trainer = read(["torchrun", "--nproc_per_node", "8", "pretrain_gpt.py", *words]).on()
    lines, again = trainer.changed({**trainer.config, **wanted})
    made = parse([word for line in lines if line.new is not None for word in shlex.split(line.text)])
    assert {knob: getattr(again.strategy(), knob) for knob in wanted} == wanted
    assert made.expert_tensor_parallel_size is None, "its default is tp, and 0 is refused"
    assert all(not line.text.endswith((" 0", " False", " None")) for line in lines)


def test_stages_that_megatron_is_given_by_their_layers_stay_as_many():
    words = (
        "--num-layers 32 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 64 --vocab-size 512 "
        "--seq-length 128 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5"
    )
    trainer = read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}").on()
    assert trainer.changed({**trainer.config, "pp": 2, "dp": 4}) is None
    assert trainer.changed({**trainer.config, "micro_batch": 2, "grad_accum": 16}) is not None


@pytest.mark.parametrize("model", MODELS)
def test_megatron_is_told_the_models_sizes(model):
    made = parse(megatron_arguments(model, "one device")[0])
    configuration = architecture(model).configuration()
    assert made.num_layers == configuration.num_hidden_layers
    assert made.hidden_size == configuration.hidden_size
    assert made.num_attention_heads == configuration.num_attention_heads
    assert made.vocab_size == configuration.vocab_size
    assert made.max_position_embeddings == configuration.max_position_embeddings
    assert made.untie_embeddings_and_output_weights is not configuration.tie_word_embeddings
    groups = getattr(configuration, "num_key_value_heads", configuration.num_attention_heads)
    assert (made.num_query_groups or configuration.num_attention_heads) == groups
    assert made.group_query_attention is (groups != configuration.num_attention_heads)


@pytest.mark.parametrize("model", ["llama3-8b", "llama3.2-1b", "qwen2-7b", "qwen3-0.6b", "mistral-7b", "gpt2"])
def test_megatrons_model_has_the_parameters_of_the_preset(model):
    """The count is computed from the flags by the structure of Megatron's GPT."""
    made = parse(megatron_arguments(model, "one device")[0])
    hidden, heads = made.hidden_size, made.num_attention_heads
    width = made.kv_channels or hidden // heads
    groups = made.num_query_groups or heads
    queries, keys = heads * width, groups * width
    biased = not made.disable_bias_linear
    norm = hidden * (2 if made.normalization == "LayerNorm" else 1)
    attention = hidden * (queries + 2 * keys) + queries * hidden + biased * hidden
    attention += (biased or made.add_qkv_bias) * (queries + 2 * keys) + made.qk_layernorm * 2 * width
    ffn = made.ffn_hidden_size
    mlp = (3 if made.swiglu else 2) * hidden * ffn + biased * (ffn + hidden)
    total = made.num_layers * (attention + mlp + 2 * norm) + norm
    total += made.vocab_size * hidden * (2 if made.untie_embeddings_and_output_weights else 1)
    total += made.max_position_embeddings * hidden * (made.position_embedding_type == "learned_absolute")
    assert total == PRESETS[model].parameters


def test_megatrons_flags_of_a_model_with_latent_attention_are_read_back_as_that_model():
    given, _ = megatron_arguments("deepseek-v3", "one device")
    made = parse(given)
    assert made.multi_latent_attention and (made.q_lora_rank, made.kv_lora_rank) == (1536, 512)
    assert (made.qk_head_dim, made.qk_pos_emb_head_dim, made.v_head_dim) == (128, 64, 128)
    assert (made.moe_layer_freq, made.moe_shared_expert_intermediate_size) == ("([0]*3+[1]*58)", 2048)
    found = read(f"torchrun --nproc-per-node 8 pretrain_gpt.py {shlex.join(given)}")
    model = skeleton(workload(ServerModel.of(found.architecture)))
    assert sum(each.numel() for each in model.parameters()) == PRESETS["deepseek-v3"].parameters


def test_megatron_is_told_what_else_makes_a_family():
    def of(model, name="one device", **more):
        return parse(megatron_arguments(model, name, **more)[0])

    llama = of("llama3.2-1b")
    assert (llama.rotary_base, llama.use_rope_scaling) == (500000, True)
    assert (llama.hidden_dropout, llama.attention_dropout, llama.norm_epsilon) == (0.0, 0.0, 1e-5)
    assert of("llama3-8b").use_rope_scaling is False
    assert (of("mixtral-8x7b").num_experts, of("mixtral-8x7b").moe_router_topk) == (8, 2)
    assert of("gpt-neox-20b").rotary_percent == 0.25
    assert of("gpt2").hidden_dropout == 0.1 and of("gpt2").position_embedding_type == "learned_absolute"
    assert of("mistral-7b").window_size is None and of("mistral-7b", seq_len=8192).window_size == "4095,0"


def test_megatron_is_told_how_experts_are_spread_and_what_they_drop():
    def of(**knobs):
        config = {"micro_batch": 1, "grad_accum": 1, "dp": 4, "ep": 2, **knobs}
        return parse(megatron_arguments("mixtral-8x7b", config)[0])

    limited = of(capacity_factor=1.25)
    assert (limited.expert_model_parallel_size, limited.moe_expert_capacity_factor) == (2, 1.25)
    assert limited.moe_pad_expert_input_to_capacity and limited.moe_token_dispatcher_type == "alltoall"
    assert of(tp=2, ep=4, etp=1, sequence_parallel=True).expert_tensor_parallel_size == 1
    for cut in (of(tp=2), of(tp=2, etp=2), of(etp=1)):
        assert cut.expert_tensor_parallel_size is None, "Megatron's default is tp"
    for dropless in (of(), of(capacity_factor=0)):
        assert dropless.moe_expert_capacity_factor is None and not dropless.moe_pad_expert_input_to_capacity


def test_model_settings_that_megatron_lacks_are_stated():
    def notes(model, **knobs):
        trial = Trial(number=0, config={"micro_batch": 1, "grad_accum": 1, **knobs}, measurement=None)
        asked = {**DOCUMENT["asked"], "shape": shape_of(architecture(model))}
        return " ".join(render("megatron", trial, {"asked": asked}).notes)

    assert "no parallel residual" in notes("gpt-neox-20b") and "no parallel residual" not in notes("llama3-8b")
    assert "this export knows only the sizes of the family opt" in notes("opt-350m")
    assert "pp=3: 32 layers are not a multiple of the stages" in notes("llama3-8b", pp=3)
    assert "no multiple" not in notes("llama3-8b", pp=4)
    assert "by a factor of 32: Megatron parses --rope-scaling-factor, but" in notes("llama3.2-1b")
    assert "tp=2 with experts" in notes("mixtral-8x7b", tp=2)
    assert "tp=2 with experts" not in notes("mixtral-8x7b", tp=2, sequence_parallel=True)


def test_megatron_reads_every_flag_that_an_export_writes():
    """The parser also accepts flags that no training reads."""
    try:
        core = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed (it needs Python 3.12)")
    read = reads(Path(core.locate_file("megatron")))
    stored = {  # flags with another internal name
        "no_gradient_accumulation_fusion": "gradient_accumulation_fusion", "fp8_format": "fp8",
        "norm_epsilon": "layernorm_epsilon", "disable_bias_linear": "add_bias_linear",
    }  # fmt: skip
    flags = {
        flag
        for model, name in itertools.product(MODELS, CONFIGURATIONS)
        for flag in megatron_arguments(model, name)[0]
        if flag.startswith("--")
    }
    for flag in flags:
        name = flag[2:].replace("-", "_")
        # An equal name in another class does not count: only reads of `args` and `config` do.
        assert any((owner, stored.get(name, name)) in read for owner in ("args", "config")), flag
    assert not any((owner, "rope_scaling_factor") in read for owner in ("args", "config"))


READ_BY_MEGATRON = """
import argparse, contextlib, os, sys
from megatron.training import arguments

arguments.get_device_arch_version = lambda: 9  # there need be no device here
parser = argparse.ArgumentParser(allow_abbrev=False)
arguments.add_megatron_arguments(parser)
for name, (devices, connections, given) in json.loads(sys.argv[1]).items():
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    yours = ["--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "10"]
    made = parser.parse_args([*given, *yours])
    made.rank, made.world_size = 0, devices
    with contextlib.redirect_stdout(sys.stderr):
        arguments.validate_args(made)
    print("RESULT", json.dumps([name, [made.data_parallel_size, made.num_layers]]))
"""


def test_megatrons_own_parser_takes_its_flags(tmp_path):
    """Flags are parsed and validated for their number of ranks, for every model and configuration."""
    try:
        metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed (it needs Python 3.12)")
    layers = {model: architecture(model).configuration().num_hidden_layers for model in MODELS}
    asked, expected = {}, {}
    for model, name in itertools.product(MODELS, CONFIGURATIONS):
        config = CONFIGURATIONS[name]
        if layers[model] % (config.get("pp", 1) * config.get("virtual_stages", 1)):
            continue  # Megatron refuses it, as a note of the export states
        given, connections = megatron_arguments(model, name)
        devices = prod(config.get(name, 1) for name in ("tp", "cp", "pp", "dp"))  # without `sp`, which Megatron lacks
        asked[f"{model}, {name}"] = [devices, connections, given]
        expected[f"{model}, {name}"] = [config.get("dp", 1), layers[model]]
    assert results(WITHOUT_TRITON + READ_BY_MEGATRON, asked, tmp_path) == expected
