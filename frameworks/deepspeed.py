"""DeepSpeed: its JSON configuration (https://www.deepspeed.ai/docs/config-json/)."""

import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError
from ..knobs.strategy import Strategy
from ..knobs.text import value_text
from .common import (
    adamw,
    note_attention,
    note_hsdp,
    note_kernels,
    note_lora,
    note_order,
    note_tf32,
    optimizer_text,
    read_optimizer,
    torch_optimizer,
)
from .export_input import ExportInput, Target
from .framework import SettingsReader, framework_of, knob_table, nested, number

CHECKED = ("deepspeed", "0.19")
_BF16, _FP16 = "bf16.enabled", "fp16.enabled"
_DEVICE = "zero_optimization.offload_optimizer.device"
KNOBS = knob_table("deepspeed")
"""DeepSpeed's names of the knobs in its configuration."""


def config(setup: ExportInput) -> dict[str, Any]:
    """Returns the configuration; train_batch_size is micro-batch x accumulation x replicas.

    Raises:
        UsageError: the configuration has both tensor parallelism and pipeline stages.
    """
    if setup.tp > 1 and setup.pp > 1:
        raise UsageError(
            f"cannot export trial {setup.trial.number} to deepspeed: DeepSpeed cannot run "
            f"tp={setup.tp} with pp={setup.pp} from a file, since its AutoTP cuts Hugging Face models and its "
            "pipelines take a PipelineModule; megatron, torchtitan and python have both"
        )
    document: dict[str, Any] = {}
    if setup.micro_batch is not None:
        document["train_batch_size"] = setup.global_batch
        document |= KNOBS["micro_batch"].settings(setup.micro_batch) | KNOBS["grad_accum"].settings(setup.grad_accum)
    else:
        setup.note("the batch is not known: set train_micro_batch_size_per_gpu")
    zero = _zero(setup)
    document["zero_optimization"] = zero
    document |= _precision(setup, zero["stage"])
    setup.knob("reduce_dtype")
    if setup.replicas > 1:
        document |= KNOBS["reduce_dtype"].settings("bf16" if setup.formats.reduced == "bf16" else "fp32")
    document |= _optimizer(setup, zero)
    # By default DeepSpeed clips at 1, which was not measured.
    document["gradient_clipping"] = 0.0
    # Its timer would wait for the device twice in every micro-batch.
    document["timers"] = {"throughput": {"enabled": False}}
    if setup.tp > 1:
        document |= nested(KNOBS["tp"].settings(setup.tp))
        setup.note(
            f"tp={setup.tp} became DeepSpeed's AutoTP, which cuts the models it knows; check that it knows this one"
        )
    if setup.sp > 1:
        document |= KNOBS["sp"].settings(setup.sp)
        setup.note(
            f"sp={setup.sp}: give deepspeed.initialize(mpu=...) what UlyssesSPAttentionHF.register_with_transformers("
            f"..., sequence_parallel_size={setup.sp}, micro_batch_size={setup.micro_batch}) returns, and take batches "
            "from UlyssesSPDataLoaderAdapter (deepspeed.runtime.sequence_parallel.ulysses_sp); the loss of a piece is "
            "weighed by its labels in your loop"
        )
    if setup.pp > 1:
        document |= nested(KNOBS["pp"].settings(setup.pp))
        setup.note(
            f"pp={setup.pp}: the model must be a deepspeed.pipe.PipelineModule(num_stages={setup.pp}); "
            "gradient_accumulation_steps are its micro-batches"
        )
        note_order(setup, ["1f1b"], "DeepSpeed's pipelines run 1F1B")
    _note_the_rest(setup)
    return document


def _zero(setup: ExportInput) -> dict[str, Any]:
    stage = setup.knob("zero")
    if setup.pp > 1 and stage > 1:
        setup.note(f"zero={stage}: DeepSpeed's pipelines take stage 1 at most, so stage 1 is set")
        stage = 1
    note_hsdp(
        setup,
        "MiCS is no longer in DeepSpeed, and its hpZ keeps a copy of the weights, and of them alone, within a host",
    )
    section: dict[str, Any] = {"stage": stage}
    if setup.knob("offload") == "optimizer":
        if stage == 0 and setup.replicas > 1:
            setup.note(f"offload=optimizer needs ZeRO in DeepSpeed, so stage 1 is set: less memory than {setup.found}")
        # On one replica stage 1 shards nothing.
        section = {"stage": max(stage, 1), "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    elif setup.knob("offload") != "none":
        setup.note(f"offload={setup.knob('offload')} has no counterpart here")
    return section


def _precision(setup: ExportInput, stage: int) -> dict[str, Any]:
    precision = setup.knob("precision")
    if precision == "bf16":
        setup.note(
            "precision=bf16 was autocast over fp32 weights; DeepSpeed keeps the weights in bfloat16 and "
            "an fp32 master copy"
        )
    if precision == "tf32":
        note_tf32(setup)
        precision = "fp32"
    if precision == "bf16_pure" and stage == 0:
        setup.note("precision=bf16_pure: at stage 0 DeepSpeed keeps fp32 master weights: more memory")
        precision = "bf16"
    if setup.formats.scaling:
        setup.note(
            f"precision={precision} has no counterpart here: bf16 is set; before deepspeed.initialize "
            "torchao.float8.convert_to_float8_training converts your model"
        )
        precision = "bf16"
    return nested(KNOBS["precision"].settings(precision)) if precision != "fp32" else {}


def _optimizer(setup: ExportInput, zero: Mapping[str, Any]) -> dict[str, Any]:
    fused, measured = setup.knob("fused_optimizer"), adamw(setup)
    if setup.optimizer:
        return _own_optimizer(setup)
    if not measured:
        if fused:
            setup.note(
                "fused_optimizer=true is your optimizer's: give deepspeed.initialize a "
                "torch.optim.AdamW(..., fused=True)"
            )
        return {}
    params = dict(measured)
    if "offload_optimizer" in zero:
        setup.note("offload=optimizer: DeepSpeed updates by its own DeepSpeedCPUAdam, which it compiles at first use")
    else:
        # PyTorch's own optimizer, as measured: DeepSpeed's fused one has to be compiled.
        adam = nested(KNOBS["fused_optimizer"].settings(True))["optimizer"]["params"]
        params |= adam if fused else {name: value for name, value in adam.items() if name != "fused"}
    return {"optimizer": {"type": "AdamW", "params": params}}


def _own_optimizer(setup: ExportInput) -> dict[str, Any]:
    """The optimizer of the user's workload: DeepSpeed makes any of torch.optim by its name."""
    optimizer = torch_optimizer(setup)
    if optimizer is None:
        call = optimizer_text(setup, "model.parameters()")
        setup.missing.append(f"the optimizer: give deepspeed.initialize(optimizer={call})")
        return {}
    name, settings = optimizer
    return {"optimizer": {"type": name, "params": settings}}


def _note_the_rest(setup: ExportInput) -> None:
    note_lora(setup)
    ratio = setup.knob("checkpoint_ratio")
    if ratio:
        setup.note(
            f"checkpoint_ratio={value_text(ratio)} is the model's: model.gradient_checkpointing_enable(), or "
            "deepspeed.checkpointing.checkpoint in your own blocks"
        )
    if setup.knob("fusion"):
        setup.note("fusion=true: call engine.compile() after deepspeed.initialize; it compiles the whole model")
    if setup.device_type == "cpu" and setup.processes > 1:
        setup.note(
            "on CPUs DeepSpeed compiles its exchange over shared memory at the first start (some minutes) "
            "and keeps it in TORCH_EXTENSIONS_DIR; a start that was killed meanwhile leaves a lock there, "
            "for which the next one waits"
        )
    note_attention(setup)
    setup.note_unless_neutral("sequence_parallel", "AutoTP keeps activations whole")
    note_kernels(setup)


def _json(setup: ExportInput, comment: str) -> str:
    # JSON has no comments; DeepSpeed ignores unknown keys.
    head = {"_comment": comment.splitlines()} if comment else {}
    return json.dumps(head | config(setup), indent=2) + "\n"


def _start(setup: ExportInput, file: str) -> str:
    # DeepSpeed's own launcher would need a file of hosts and ssh between them; torchrun's variables are enough.
    if setup.hosts.count > 1 or setup.device_type == "cpu":
        launcher = setup.torchrun()
    else:
        launcher = f"deepspeed --num_gpus {setup.processes}"
    if setup.device_type == "cpu":
        launcher = f"DS_ACCELERATOR=cpu {launcher}"
    return f"{launcher} train.py --deepspeed_config {file}"


TARGET = Target(
    name="deepspeed",
    about="JSON configuration of DeepSpeed: batch, ZeRO, offload, precision",
    stem="deepspeed",
    forms={"json": _json},
    checked=CHECKED,
    sequences=("sp",),
    start=_start,
)


def read(reader: SettingsReader) -> None:
    """Reads the batch, the optimizer and DeepSpeed's defaults."""
    if (total := reader.whole("train_batch_size")) is not None:
        reader.facts["global_batch"] = total
    read_offloaded_weights(reader, "zero_optimization.offload_param.device")
    list_nvme(reader, _DEVICE)
    zero, offload = reader.knobs.get("zero"), reader.knobs.get("offload")
    if offload == "optimizer" and zero == 0:
        reader.note(f"{_DEVICE} has no effect at zero_optimization.stage 0: DeepSpeed offloads from stage 1 on")
        reader.knobs["offload"] = "none"
    if reader.flag(_BF16) and reader.flag(_FP16):
        reader.note("bf16.enabled and fp16.enabled are both true, which DeepSpeed refuses")
    if (
        reader.get("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing")
        is not None
    ):
        reader.note(
            "activation_checkpointing configures deepspeed.checkpointing; it recomputes nothing unless the model calls "
            "it, or gradient checkpointing is on in the trainer"
        )
    read_optimizer(reader, "optimizer.type")
    bucket = number(reader.get("zero_optimization.reduce_bucket_size"))
    if isinstance(bucket, int | float) and 1e6 <= bucket <= 1e10:
        reader.conventions["bucket_mib"] = 2 * bucket / 2**20  # elements of 16 bits


def read_offloaded_weights(reader: SettingsReader, key: str) -> None:
    """Reads weights in host memory, which stage 3 alone has; the estimate has them there only beside the optimizer."""
    if str(reader.get(key) or "none").lower() in ("none", "false"):
        return
    list_nvme(reader, key)
    if reader.knobs.get("zero") != 3:
        reader.note(f"{reader.name(key)} has no effect below stage 3: DeepSpeed then offloads no weights")
    elif reader.knobs.get("offload") == "optimizer":
        reader.conventions["offload_weights"] = True
    else:
        reader.misunderstood(key)
        reader.note(f"{reader.name(key)} without an offloaded optimizer: weights are taken to stay on the device")


def list_nvme(reader: SettingsReader, *keys: str) -> None:
    """Lists settings that offload to disks as not read: the estimate knows no disk's speed."""
    for key in keys:
        if "nvme" in str(reader.get(key)):
            reader.misunderstood(key)
            reader.note(
                f"{key} = {reader.get(key)} is predicted like cpu: a step takes longer, by the speed of the disks"
            )


def conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """16-bit weights and gradients beside fp32 master weights, unlike autocast; an offloaded optimizer of its own."""
    half = config.get("precision") in ("bf16", "fp16")
    formats = {"precision": "bf16_pure", "master_weights": "fp32", "gradient_dtype": "bf16"} if half else {}
    return {**formats, "deepspeed_update": True}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch, if the file has it."""
    if not reader.has("train_batch_size"):
        return {}
    return {"train_batch_size": strategy.micro_batch * strategy.grad_accum * strategy.dp}


FRAMEWORK = framework_of("deepspeed", KNOBS, conventions=conventions, read=read, write=write)
