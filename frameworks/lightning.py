"""Lightning: the YAML of its LightningCLI (https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html)."""

from typing import Any

from ..knobs.strategy import Strategy
from ..knobs.text import value_text
from . import deepspeed
from .common import (
    adamw,
    note_adamw,
    note_attention,
    note_hsdp,
    note_kernels,
    note_lora,
    note_pipeline,
    note_reduction,
    note_tf32,
    optimizer_text,
    read_one_unit,
    read_optimizer,
    torch_optimizer,
)
from .export_input import ExportInput, Target, as_yaml
from .framework import SettingsReader, framework_of, knob_table, nested

CHECKED = ("lightning", "2.6")

_FORMATS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "bf16_pure": "bf16-true"}
_CLASS, _ARGUMENTS = "trainer.strategy.class_path", "trainer.strategy.init_args."
_MESH = {_CLASS: "lightning.pytorch.strategies.ModelParallelStrategy"}
KNOBS = knob_table("lightning")
"""LightningCLI's names of the knobs."""


def config(setup: ExportInput) -> dict[str, Any]:
    """Returns the sections `trainer` and `optimizer`."""
    note_pipeline(setup)
    trainer: dict[str, Any] = {
        "accelerator": "cpu" if setup.device_type == "cpu" else "gpu",
        "devices": setup.hosts.each,
        "num_nodes": setup.hosts.count,
        "strategy": _strategy(setup),
        "precision": _precision(setup),
    }
    if setup.micro_batch is not None:
        trainer |= nested(KNOBS["grad_accum"].settings(setup.grad_accum))["trainer"]
        setup.note(f"micro_batch={setup.micro_batch} is your DataLoader's batch_size")
    else:
        setup.note("the batch is not known: set your DataLoader's batch_size and accumulate_grad_batches")
    # Redrawing the progress bar with every micro-batch slows down the training.
    trainer["enable_progress_bar"] = False
    sections: dict[str, Any] = {"trainer": trainer}
    if isinstance(trainer["strategy"], str):
        sections |= _optimizer(setup)
    else:
        note_adamw(setup)
        setup.note(
            "the optimizer is made in configure_optimizers() of your module: LightningCLI would make one of this file "
            "before configure_model() cuts the weights, and it would train none of the pieces"
        )
    _note_the_rest(setup)
    return sections


def _precision(setup: ExportInput) -> str:
    if scaling := setup.formats.scaling:
        setup.note(
            f"precision={setup.knob('precision')} is bf16 here with your module's linear layers converted: "
            "in configure_model(), torchao.float8.convert_to_float8_training(each, "
            f"config=Float8LinearConfig.from_recipe_name({scaling!r})) of each block"
        )
        return _FORMATS["bf16"]
    if setup.knob("precision") == "tf32":
        note_tf32(setup)
        return _FORMATS["fp32"]
    return _FORMATS[setup.knob("precision")]


def _strategy(setup: ExportInput) -> Any:
    if setup.processes == 1:
        return "auto"
    zero = setup.knob("zero") if setup.dp > 1 else 0
    if zero == 0 and setup.tp == 1:
        return KNOBS["zero"].settings(0)["trainer.strategy"]
    if zero == 0 and setup.dp > 1:
        setup.note("zero=0 beside tp: Lightning has no DDP with tp, so shard the replicas by fully_shard too")
    if setup.tp > 1:
        setup.note(
            f"tp={setup.tp}: your module's configure_model() cuts the model, by parallelize_module(model, "
            "self.device_mesh['tensor_parallel'], plan)"
        )
    note_hsdp(setup, "a mesh of your own, init_device_mesh(...) of replicas and shards, would keep the groups")
    if setup.dp > 1:
        stage = "which shards the gradients too (ZeRO stage 2)" if zero == 1 else f"ZeRO stage {zero or 2}"
        setup.note(
            f"zero={zero}: your module's configure_model() shards it, {stage}: fully_shard(each, "
            "mesh=self.device_mesh['data_parallel'], reshard_after_forward="
            f"{setup.exchange.gathered == 'pass'}) of each block, then of the model"
        )
    sizes = {f"{_ARGUMENTS}data_parallel_size": setup.dp} | KNOBS["tp"].settings(setup.tp)
    return nested(_MESH | sizes)["trainer"]["strategy"]


def _optimizer(setup: ExportInput) -> dict[str, Any]:
    fused, settings = setup.knob("fused_optimizer"), dict(adamw(setup))
    class_path = "torch.optim.AdamW"
    if setup.optimizer:
        optimizer = torch_optimizer(setup)
        if optimizer is None:
            call = optimizer_text(setup, "self.parameters()")
            setup.missing.append(f"the optimizer: let configure_optimizers() of your module return {call}")
            return {}
        name, settings = optimizer
        class_path = f"torch.optim.{name}"
    elif fused:
        settings["fused"] = True
    if not settings:
        return {}
    setup.note("this file has the optimizer: leave configure_optimizers() out of your module")
    return {"optimizer": {"class_path": class_path, "init_args": settings}}


def _note_the_rest(setup: ExportInput) -> None:
    note_lora(setup)
    note_reduction(setup, "Lightning's DDP averages gradients in their own format; register a hook of your own")
    ratio = setup.knob("checkpoint_ratio")
    if ratio:
        setup.note(
            f"checkpoint_ratio={value_text(ratio)} is the model's: model.gradient_checkpointing_enable() for all blocks"
        )
    if setup.knob("fusion"):
        setup.note("fusion=true: compile each repeated block in your module, by block.compile()")
    note_attention(setup)
    setup.note_unless_neutral("offload", "the target deepspeed has it")
    setup.note_unless_neutral("sequence_parallel", "cut activations by your own plan")
    note_kernels(setup)


TARGET = Target(
    name="lightning",
    about="config of LightningCLI: strategy, precision, accumulation, optimizer",
    stem="lightning",
    forms={"yaml": as_yaml(config)},
    checked=CHECKED,
    pipelines=False,
    use=lambda file: "LightningCLI(YourModule, YourData) in train.py",
    start=lambda setup, file: f"{setup.torchrun()} train.py fit --config {file}",
)


def prepare(reader: SettingsReader) -> None:
    """Fills in the stage of DeepSpeedStrategy, unless it has a file, which replaces its other arguments."""
    if not str(reader.get(_CLASS) or "").endswith("DeepSpeedStrategy"):
        return
    if reader.has(f"{_ARGUMENTS}config"):
        replaced = [name for name in reader.settings if name.startswith(_ARGUMENTS) and name != f"{_ARGUMENTS}config"]
        reader.note(
            f"DeepSpeedStrategy takes its file alone: {', '.join(replaced) or 'no argument'} has no effect beside it"
        )
        for name in replaced:
            reader.override(name, None)
    else:
        reader.set(f"{_ARGUMENTS}stage", 2)


def read(reader: SettingsReader) -> None:
    """Reads the devices, the strategy's sizes, and DeepSpeed's formats."""
    name = str(reader.get("trainer.strategy", _CLASS) or "")
    if name.startswith("ddp") or name.endswith("DDPStrategy"):  # in several spellings
        reader.knobs.setdefault("zero", 0)
    if reader.flag(f"{_ARGUMENTS}gradient_as_bucket_view"):
        reader.conventions["bucket_copy"] = False
    if "fsdp" in name.lower():
        reader.knobs.setdefault("zero", 3)
        if reader.get(f"{_ARGUMENTS}auto_wrap_policy") is None:
            read_one_unit(reader, "without auto_wrap_policy, unless configure_model() of your module wraps layers,")
        if reader.flag(f"{_ARGUMENTS}cpu_offload") or name.endswith("cpu_offload"):
            reader.conventions["offload_weights"] = True  # FSDP's CPUOffload, of shards of weights and gradients
    if "HYBRID" in str(reader.get(f"{_ARGUMENTS}sharding_strategy")).upper():
        reader.facts["hybrid"] = True
    if "offload" in name:
        reader.knobs["offload"] = "optimizer"
    if "deepspeed" in name.lower():
        if reader.knobs.get("precision") == "bf16_pure":  # bf16-true, too, is DeepSpeed's bf16.enabled
            reader.knobs["precision"] = "bf16"
        if "stage_3_offload" in name:
            reader.conventions["offload_weights"] = True
        deepspeed.read_offloaded_weights(reader, f"{_ARGUMENTS}offload_parameters")
        reader.conventions["deepspeed_update"] = True
        offloads = (f"{_ARGUMENTS}offload_{part}_device" for part in ("params", "optimizer"))
        deepspeed.list_nvme(reader, "trainer.strategy", *offloads)
    if "ModelParallel" in name:
        if (dp := reader.whole(f"{_ARGUMENTS}data_parallel_size")) is not None:
            reader.knobs["dp"] = dp
        reader.note(
            "ModelParallelStrategy leaves sharding and checkpointing to configure_model() of your module: state them "
            "by --fix zero=3 --fix checkpoint_ratio=1"
        )
    if reader.get(*(f"{_ARGUMENTS}activation_checkpointing{name}" for name in ("_policy", ""))) is not None:
        reader.knobs["checkpoint_ratio"] = 1
    read_optimizer(reader, "optimizer.class_path", "optimizer")
    listed = reader.get("trainer.devices")
    devices = len(listed) if isinstance(listed, list) else reader.whole("trainer.devices")
    hosts = reader.whole("trainer.num_nodes") or 1
    if devices is not None:
        reader.facts |= {"devices": devices * hosts, "per_host": devices}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the replicas, if the file has them."""
    key = f"{_ARGUMENTS}data_parallel_size"
    return {key: strategy.dp} if reader.has(key) else {}


FRAMEWORK = framework_of(
    "lightning", KNOBS, prepare=prepare, read=read, write=write, conventions=lambda config: {"bucket_copy": True}
)
