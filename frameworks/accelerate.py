"""Hugging Face Accelerate: the YAML that `accelerate launch --config_file` reads."""

from typing import Any

from ..knobs.strategy import Strategy
from . import deepspeed
from .common import (
    DDP_HOOK,
    FSDP_OFFLOAD,
    FSDP_ZERO_1,
    no_fsdp_on_a_cpu,
    note_adamw,
    note_attention,
    note_kernels,
    note_lora,
    note_partial_checkpointing,
    note_pipeline,
    note_pure_bf16,
    note_reduction,
    note_tf32,
    read_one_unit,
)
from .export_input import PORT, ExportInput, Target, as_yaml
from .framework import SettingsReader, file_keys, framework_of, knob_table, nested, text_of
from .trainer import conventions

CHECKED = ("accelerate", "1.15")
_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
_DYNAMO = "dynamo_config.dynamo_backend"
_SIZE = "parallelism_config.parallelism_config_{}_size"
_DEEPSPEED = "deepspeed_config.zero_stage"
_WRAP, _WRAPPED = "fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"
_EARLIER_KEYS = ("fp16", "dynamo_backend", "megatron_lm_plugin", "tpu_commands", "ipex_config", "main_process_name")
KNOBS = knob_table("accelerate")
"""Accelerate's names of the knobs in its file; its options are the last parts of these names."""


def config(setup: ExportInput) -> dict[str, Any]:
    """The keys of accelerate's ClusterConfig."""
    note_pipeline(setup)
    sharded = _shards(setup)
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(setup, sharded),
        **_rendezvous(setup),
        "main_training_function": "main",
        "mixed_precision": _mixed_precision(setup),
        "num_machines": setup.hosts.count,
        "num_processes": setup.processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": setup.device_type == "cpu",
    }
    if setup.formats.scaling:
        document["fp8_config"] = _fp8(setup)
    if sharded:
        document |= _fsdp(setup)
    else:
        if setup.knob("checkpoint_ratio") > 0:
            setup.note(
                "checkpoint_ratio: without FSDP accelerate leaves activations to the model: call "
                "model.gradient_checkpointing_enable()"
            )
        setup.note_unless_neutral("offload", "accelerate offloads with FSDP only")
    note_partial_checkpointing(setup, "this checkpoints every block")
    groups = setup.knob("hsdp") if sharded else setup.dp
    if setup.tp > 1 or (sharded and groups > 1):
        document |= nested(_replicas(groups, setup.dp) | KNOBS["tp"].settings(setup.tp) | KNOBS["cp"].settings(1))
    if setup.tp > 1:
        setup.note(
            f"tp={setup.tp}: the model must be loaded cut as well, by from_pretrained(..., tp_plan='auto', "
            "device_mesh=accelerator.torch_device_mesh['tp'])"
        )
    if setup.knob("fusion"):
        document["dynamo_config"] = {
            "dynamo_backend": KNOBS["fusion"].settings(True)[_DYNAMO],
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
            # Each repeated block is compiled, as redline does.
            "dynamo_use_regional_compilation": True,
        }
    _note_the_rest(setup)
    return document


def _rendezvous(setup: ExportInput) -> dict[str, Any]:
    if _ranks_on_a_cpu(setup):
        setup.note(
            "accelerate launch starts several processes of a CPU by MPI only (mpirun_config): by the line "
            "above torchrun starts them, and accelerate launch reads this file for each"
        )
        return {"machine_rank": 0}
    if setup.hosts.count == 1:
        return {"machine_rank": 0}
    setup.note(
        "machine_rank, main_process_ip and main_process_port are of the first host, and FIRST-HOST is a "
        "placeholder for its name: each host gives its own by the options --machine_rank, --main_process_ip and "
        "--main_process_port"
    )
    return {"machine_rank": 0, "main_process_ip": "FIRST-HOST", "main_process_port": PORT}


def _ranks_on_a_cpu(setup: ExportInput) -> bool:
    return setup.device_type == "cpu" and setup.processes > 1


def _shards(setup: ExportInput) -> bool:
    zero = setup.knob("zero")
    if setup.dp == 1:
        return False
    if no_fsdp_on_a_cpu(setup):
        return False
    if zero == 0 and setup.tp > 1:
        setup.note("zero=0 beside tp: accelerate has no DDP with tp, so the replicas are sharded by FSDP2")
        return True
    if zero == 1:
        setup.note(FSDP_ZERO_1)
    return zero > 0


def _distributed_type(setup: ExportInput, sharded: bool) -> str:
    if sharded:
        return "FSDP"
    if setup.processes == 1:
        return "NO"
    return "MULTI_CPU" if setup.device_type == "cpu" else "MULTI_GPU"


def _mixed_precision(setup: ExportInput) -> str:
    precision = setup.knob("precision")
    if precision == "bf16_pure":
        note_pure_bf16(setup)
    if precision == "tf32":
        note_tf32(setup)
    # An 8-bit file has one scale per tensor, whichever was measured.
    expressible = {"bf16_pure": "fp32", "tf32": "fp32", "fp8_rowwise": "fp8"}.get(precision, precision)
    return str(KNOBS["precision"].settings(expressible)["mixed_precision"])


def _fp8(setup: ExportInput) -> dict[str, Any]:
    setup.note(
        "accelerate converts the first and the last linear layer too, the head's among them, unless "
        "Accelerator(kwargs_handlers=[AORecipeKwargs(module_filter_func=...)]) leaves them out"
    )
    if setup.formats.scaling != "tensorwise":
        setup.note(
            f"precision={setup.knob('precision')}: a file gives each tensor one scale; each row has its own "
            "by AORecipeKwargs(config=Float8LinearConfig.from_recipe_name('rowwise'))"
        )
    return {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}


def _fsdp(setup: ExportInput) -> dict[str, Any]:
    offload = setup.knob("offload") == "optimizer"
    if offload:
        setup.note(FSDP_OFFLOAD)
    stage = 2 if setup.exchange.gathered in ("update", "step") else 3
    zero = {name: value for name, value in KNOBS["zero"].settings(stage).items() if name != "distributed_type"}
    return nested(
        {"fsdp_config.fsdp_version": zero.pop("fsdp_config.fsdp_version")}
        | {"fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        | zero
        | KNOBS["offload"].settings("optimizer" if offload else "none")
        | KNOBS["checkpoint_ratio"].settings(int(setup.knob("checkpoint_ratio") > 0))
        | {
            "fsdp_config.fsdp_cpu_ram_efficient_loading": False,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    )


def _replicas(groups: int, dp: int) -> dict[str, int]:
    return {_SIZE.format("dp_replicate"): groups, _SIZE.format("dp_shard"): dp // groups}


def _note_the_rest(setup: ExportInput) -> None:
    note_reduction(setup, DDP_HOOK)
    note_lora(setup)
    if setup.micro_batch is not None:
        setup.note(
            f"micro_batch={setup.micro_batch} is your DataLoader's batch_size, and "
            f"grad_accum={setup.grad_accum} is Accelerator(gradient_accumulation_steps={setup.grad_accum})"
        )
    note_attention(setup)
    note_adamw(setup)
    setup.note_unless_neutral("sequence_parallel", "cut activations by the model's own tp_plan")
    note_kernels(setup)


def _start(setup: ExportInput, file: str) -> str:
    if _ranks_on_a_cpu(setup):
        # For each rank alone: torchrun sets what the ranks have in common.
        alone = "--num_machines 1 --num_processes 1"
        return f"{setup.torchrun()} --no-python accelerate launch --config_file {file} {alone} train.py"
    host_options = ""
    if setup.hosts.count > 1:
        host_options = (
            '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" '
            f'--main_process_port "${{MASTER_PORT:-{PORT}}}" '
        )
    return f"accelerate launch --config_file {file} {host_options}train.py"


TARGET = Target(
    name="accelerate",
    about="config of Hugging Face Accelerate: FSDP2 or DDP, parallelism, precision, compilation",
    stem="accelerate",
    forms={"yaml": as_yaml(config)},
    checked=CHECKED,
    pipelines=False,
    start=_start,
)


def prepare(reader: SettingsReader) -> None:
    """Fills in accelerate's defaults for missing options and FSDP settings; those of an engine that is not used are removed."""
    for option, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("multi_gpu", "MULTI_GPU")):
        if reader.flag(option):
            reader.set("distributed_type", kind)
    if reader.where.endswith((".yaml", ".yml", ".json")):
        refused = sorted(
            {name.partition(".")[0] for name in reader.settings} - {*file_keys("accelerate"), *_EARLIER_KEYS}
        )
        if refused:
            reader.note(f"accelerate refuses the file: it has no keys {', '.join(refused)}")
    engine = reader.get("distributed_type")
    for prefix, kind in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        idle = [name for name, value in reader.settings.items() if name.startswith(f"{prefix}.") and value is not None]
        if idle and engine not in (None, kind):
            reader.note(f"{prefix} has no effect with distributed_type: {engine}")
            for name in idle:
                reader.override(name, None)
    if engine == "DEEPSPEED" and not reader.has("deepspeed_config.deepspeed_config_file"):
        reader.set(_DEEPSPEED, 2)  # DeepSpeedPlugin
    version = reader.whole("fsdp_config.fsdp_version")
    if version is None and engine == "FSDP":
        version = 1 if reader.has(_STRATEGY) or isinstance(reader.get(_RESHARD), str) else 2
        reader.set("fsdp_config.fsdp_version", version)
    if version == 2:
        reader.set(_RESHARD, True)
    elif version == 1 and engine == "FSDP":
        reader.set(_STRATEGY, "FULL_SHARD")


def read(reader: SettingsReader) -> None:
    """Reads groups of replicas, processes, the wrapping, and settings of other engines."""
    replicate, shard = reader.whole(_SIZE.format("dp_replicate")), reader.whole(_SIZE.format("dp_shard"))
    if replicate is not None or shard is not None:
        reader.knobs["dp"] = (replicate or 1) * (shard or 1)
        if (replicate or 1) > 1 and reader.knobs.get("zero"):
            reader.knobs["hsdp"] = replicate
    if str(reader.get(_STRATEGY, _RESHARD)).upper() in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
        reader.knobs["zero"] = 3 if str(reader.get(_STRATEGY, _RESHARD)).upper() in ("HYBRID_SHARD", "4") else 2
        reader.facts["hybrid"] = True
    if reader.knobs.get("checkpoint_ratio") == 0:
        del reader.knobs["checkpoint_ratio"]  # a trainer's own checkpointing is not switched off by FSDP's
    engine = reader.get("distributed_type")
    policy = str(reader.get(_WRAP) or "NO_WRAP").upper()
    if policy == "SIZE_BASED_WRAP":
        reader.misunderstood(_WRAP)
    elif policy == "NO_WRAP" and engine == "FSDP":
        read_one_unit(reader, f"by {_WRAP} = NO_WRAP{'' if reader.has(_WRAP) else ', the default,'}")
    if engine == "MEGATRON_LM":
        for knob in ("tp", "pp"):
            if (degree := reader.whole(f"megatron_lm_config.megatron_lm_{knob}_degree")) is not None:
                reader.knobs[knob] = degree
    if engine == "DEEPSPEED":
        deepspeed.list_nvme(reader, "deepspeed_config.offload_optimizer_device")
        reader.conventions["deepspeed_update"] = True
        deepspeed.read_offloaded_weights(reader, "deepspeed_config.offload_param_device")
    processes = reader.whole("num_processes")
    if processes is not None:
        reader.facts["devices"] = processes
    if (machines := reader.whole("num_machines")) is not None and processes:
        reader.facts["per_host"] = max(1, processes // machines)


def cannot(knob: str, strategy: Strategy, reader: SettingsReader) -> bool:
    """True where a setting has no effect: FSDP's without FSDP, degrees without FSDP 2, accumulation without DeepSpeed."""
    engine = reader.get("distributed_type") or next(
        (kind for option, kind in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP")) if reader.flag(option)), None
    )
    uses_fsdp = engine != "DEEPSPEED" and strategy.zero >= 2
    if knob == "grad_accum":
        return engine != "DEEPSPEED"
    if knob in ("tp", "cp", "hsdp"):
        return not uses_fsdp or reader.has(_STRATEGY)
    if knob == "checkpoint_ratio":
        return not uses_fsdp
    return knob == "offload" and not uses_fsdp and engine != "DEEPSPEED"


def option(name: str, value: Any, reader: SettingsReader) -> str:
    """Writes an option of `accelerate launch`, which has no sections."""
    last = name.rpartition(".")[2]
    if last == "distributed_type":
        return {"FSDP": "--use_fsdp", "DEEPSPEED": "--use_deepspeed"}.get(str(value), "--multi_gpu")
    if last == "dynamo_backend":
        return f"--{last} {str(value).lower()}"
    switch = (
        "--use_parallelism_config "
        if last.startswith("parallelism_config") and not reader.has("use_parallelism_config")
        else ""
    )
    return f"{switch}--{last} {text_of(value)}"


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the wrapping of FSDP, and the sizes of the groups of replicas, which all must multiply to the processes."""
    settings: dict[str, Any] = {}
    if reader.has("config_file"):  # options beside a file, which has the engine
        return settings
    deepspeed_runs = reader.get("distributed_type") == "DEEPSPEED" or reader.flag("use_deepspeed")
    shards = reader.get("distributed_type") == "FSDP" or reader.flag("use_fsdp")
    unwrapped = str(reader.get(_WRAP) or "NO_WRAP") == "NO_WRAP" and not deepspeed_runs
    if unwrapped and (strategy.zero == 3 or (strategy.zero == 2 and not shards)):
        settings[_WRAP] = _WRAPPED
    if strategy.zero and not deepspeed_runs and reader.flag("multi_gpu"):
        settings["multi_gpu"] = None  # which accelerate refuses beside use_fsdp
    groups = strategy.hsdp if strategy.zero else strategy.dp
    undivided = strategy.hsdp == strategy.tp == strategy.cp == strategy.sp == 1
    if not reader.has(_SIZE.format("dp_shard")) and (undivided or not strategy.zero):
        return settings
    return settings | _replicas(groups, strategy.dp)


FRAMEWORK = framework_of(
    "accelerate", KNOBS, cannot=cannot, prepare=prepare, conventions=conventions, read=read, write=write, option=option
)
