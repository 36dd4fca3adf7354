"""Hugging Face Accelerate: the YAML that `accelerate launch --config_file` reads."""

from typing import Any

from .common import (
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
)
from .hosts import PORT
from .launcher import Launcher
from .setup import Setup
from .target import Target, hashed

CHECKED = ("accelerate", "1.15")


def config(setup: Setup) -> dict[str, Any]:
    """The keys of accelerate's ClusterConfig."""
    note_pipeline(setup)
    sharded = _shards(setup)
    out: dict[str, Any] = {
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
        out["fp8_config"] = _fp8(setup)
    if sharded:
        out["fsdp_config"] = _fsdp(setup)
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
        out["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": groups,
            "parallelism_config_dp_shard_size": setup.dp // groups,
            "parallelism_config_tp_size": setup.tp,
            "parallelism_config_cp_size": 1,
        }
    if setup.tp > 1:
        setup.note(
            f"tp={setup.tp}: the model must be loaded cut as well, by from_pretrained(..., tp_plan='auto', "
            "device_mesh=accelerator.torch_device_mesh['tp'])"
        )
    if setup.knob("fusion"):
        out["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
            # Each repeated block is compiled, as redline does.
            "dynamo_use_regional_compilation": True,
        }
    _note_the_rest(setup)
    return out


def _rendezvous(setup: Setup) -> dict[str, Any]:
    if _ranks_on_a_cpu(setup):
        setup.note(
            "accelerate launch starts several processes of a CPU by MPI only (mpirun_config): by the line "
            "above torchrun starts them, and accelerate launch reads this file for each"
        )
        return {"machine_rank": 0}
    if setup.hosts.count == 1:
        return {"machine_rank": 0}
    setup.note(
        "machine_rank, main_process_ip and main_process_port are of the first host, and FIRST-HOST stands "
        "for its name: each host gives its own by the options --machine_rank, --main_process_ip and "
        "--main_process_port"
    )
    return {"machine_rank": 0, "main_process_ip": "FIRST-HOST", "main_process_port": PORT}


def _ranks_on_a_cpu(setup: Setup) -> bool:
    return setup.device_type == "cpu" and setup.processes > 1


def _shards(setup: Setup) -> bool:
    zero = setup.knob("zero")
    if setup.dp == 1:
        return False
    if no_fsdp_on_a_cpu(setup):
        return False
    if zero == 0 and setup.tp > 1:
        setup.note("zero=0 beside tp: accelerate has no DDP with tp, so the replicas are sharded by FSDP2")
        return True
    if zero == 1:
        setup.note("zero=1 became FSDP2 without resharding, which shards the gradients too (ZeRO stage 2)")
    return zero > 0


def _distributed_type(setup: Setup, sharded: bool) -> str:
    if sharded:
        return "FSDP"
    if setup.processes == 1:
        return "NO"
    return "MULTI_CPU" if setup.device_type == "cpu" else "MULTI_GPU"


def _mixed_precision(setup: Setup) -> str:
    precision = setup.knob("precision")
    if precision == "bf16_pure":
        note_pure_bf16(setup)
    if precision == "tf32":
        note_tf32(setup)
    return setup.formats.compute if precision not in ("fp32", "tf32", "bf16_pure") else "no"


def _fp8(setup: Setup) -> dict[str, Any]:
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


def _fsdp(setup: Setup) -> dict[str, Any]:
    offload = setup.knob("offload") == "optimizer"
    if offload:
        setup.note("offload=optimizer became FSDP's offload, which moves parameters and gradients to host memory too")
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": setup.exchange.gathered not in ("update", "step"),
        "fsdp_offload_params": offload,
        "fsdp_activation_checkpointing": setup.knob("checkpoint_ratio") > 0,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _note_the_rest(setup: Setup) -> None:
    hook = "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16) of accelerate asks for it"
    note_reduction(setup, hook)
    note_lora(setup)
    if setup.micro_batch is not None:
        setup.note(
            f"micro_batch={setup.micro_batch} is your DataLoader's batch_size, and "
            f"grad_accum={setup.grad_accum} is Accelerator(gradient_accumulation_steps={setup.grad_accum})"
        )
    note_attention(setup, "from_pretrained(..., attn_implementation='{value}')")
    note_adamw(setup)
    setup.note_unless_neutral("sequence_parallel", "cut activations by the model's own tp_plan")
    note_kernels(setup)


def _yaml(setup: Setup, comment: str) -> str:
    import yaml

    return hashed(comment) + yaml.safe_dump(config(setup), sort_keys=False)


def _start(setup: Setup, file: str) -> str:
    if _ranks_on_a_cpu(setup):
        # For each rank by itself: what several have in common, torchrun has told them.
        alone = "--num_machines 1 --num_processes 1"
        return f"{setup.torchrun()} --no-python accelerate launch --config_file {file} {alone} train.py"
    own = ""
    if setup.hosts.count > 1:
        own = (
            '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" '
            f'--main_process_port "${{MASTER_PORT:-{PORT}}}" '
        )
    return f"accelerate launch --config_file {file} {own}train.py"


TARGET = Target(
    name="accelerate",
    about="config of Hugging Face Accelerate: FSDP2 or DDP, parallelism, precision, compilation",
    stem="accelerate",
    forms={"yaml": _yaml},
    checked=CHECKED,
    pipelines=False,
    start=_start,
)

# `accelerate launch OPTIONS script.py ...`; the micro-batch is an argument of the script.
LAUNCHER = Launcher(
    name="accelerate",
    after="launch",
    knobs={"precision": ("fp32", "bf16"), "fusion": (False, True)},
    words={
        "precision": "--mixed_precision {'no' if precision == 'fp32' else precision}",
        "fusion": "--dynamo_backend {'inductor' if fusion else 'no'}",
        "grad_accum": "--gradient_accumulation_steps {grad_accum}",
    },
)
