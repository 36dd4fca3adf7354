"""DeepSpeed: its JSON configuration (https://www.deepspeed.ai/docs/config-json/)."""

import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError
from .common import adamw, note_attention, note_hsdp, note_kernels, note_lora, note_order, note_tf32
from .launcher import MICRO_BATCHES, Launcher
from .setup import Setup, words
from .target import Target

CHECKED = ("deepspeed", "0.19")


def config(setup: Setup) -> dict[str, Any]:
    """The configuration, whose train_batch_size is micro-batch x accumulation x replicas.

    Raises:
        UsageError: there are both tensor parallelism and pipeline stages.
    """
    if setup.tp > 1 and setup.pp > 1:
        raise UsageError(
            f"cannot export trial {setup.trial.number} to deepspeed: tp={setup.tp} with pp={setup.pp} is "
            "nothing that DeepSpeed runs from a file, since its AutoTP cuts Hugging Face models and its "
            "pipelines take a PipelineModule; megatron, torchtitan and python have both"
        )
    out: dict[str, Any] = {}
    if setup.micro_batch is not None:
        out["train_batch_size"] = setup.global_batch
        out["train_micro_batch_size_per_gpu"] = setup.micro_batch
        out["gradient_accumulation_steps"] = setup.grad_accum
    else:
        setup.note("the batch is not known: set train_micro_batch_size_per_gpu")
    zero = _zero(setup)
    out["zero_optimization"] = zero
    out |= _precision(setup, zero["stage"])
    setup.knob("reduce_dtype")
    if setup.replicas > 1:
        out["communication_data_type"] = setup.formats.reduced
    out |= _optimizer(setup, zero)
    # By default it clips at 1, which was not measured.
    out["gradient_clipping"] = 0.0
    # Its timer would wait for the device twice in every micro-batch.
    out["timers"] = {"throughput": {"enabled": False}}
    if setup.tp > 1:
        out["tensor_parallel"] = {"autotp_size": setup.tp}
        setup.note(
            f"tp={setup.tp} became DeepSpeed's AutoTP, which cuts the models it knows; check that it knows this one"
        )
    if setup.sp > 1:
        out["sequence_parallel_size"] = setup.sp
        setup.note(
            f"sp={setup.sp}: give deepspeed.initialize(mpu=...) what UlyssesSPAttentionHF.register_with_transformers("
            f"..., sequence_parallel_size={setup.sp}, micro_batch_size={setup.micro_batch}) returns, and take batches "
            "from UlyssesSPDataLoaderAdapter (deepspeed.runtime.sequence_parallel.ulysses_sp); the loss of a piece is "
            "weighed by its labels in your loop"
        )
    if setup.pp > 1:
        out["pipeline"] = {"stages": setup.pp}
        setup.note(
            f"pp={setup.pp}: the model must be a deepspeed.pipe.PipelineModule(num_stages={setup.pp}); "
            "gradient_accumulation_steps are its micro-batches"
        )
        note_order(setup, ["1f1b"], "DeepSpeed's pipelines run 1F1B")
    _note_the_rest(setup)
    return out


def _zero(setup: Setup) -> dict[str, Any]:
    stage = setup.knob("zero")
    if setup.pp > 1 and stage > 1:
        setup.note(f"zero={stage}: DeepSpeed's pipelines take stage 1 at most, so stage 1 is set")
        stage = 1
    note_hsdp(setup, "MiCS is no longer in DeepSpeed, and its hpZ keeps weights alone within a host, beside these")
    out: dict[str, Any] = {"stage": stage}
    if setup.knob("offload") == "optimizer":
        if stage == 0 and setup.replicas > 1:
            setup.note(f"offload=optimizer needs ZeRO in DeepSpeed, so stage 1 is set: less memory than {setup.found}")
        # On one replica stage 1 shards nothing.
        out = {"stage": max(stage, 1), "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    elif setup.knob("offload") != "none":
        setup.note(f"offload={setup.knob('offload')} has no counterpart here")
    return out


def _precision(setup: Setup, stage: int) -> dict[str, Any]:
    precision = setup.knob("precision")
    if precision == "bf16":
        setup.note(
            "precision=bf16 was autocast over fp32 weights; DeepSpeed holds the weights in bfloat16 beside "
            "an fp32 master copy"
        )
        return {"bf16": {"enabled": True}}
    if precision == "bf16_pure":
        if stage == 0:
            setup.note("precision=bf16_pure: at stage 0 DeepSpeed keeps fp32 master weights: more memory")
            return {"bf16": {"enabled": True}}
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    if precision == "tf32":
        note_tf32(setup)
    if precision == "fp16":
        return {"fp16": {"enabled": True}}
    if setup.formats.scaling:
        setup.note(
            f"precision={precision} has no counterpart here: bf16 is set; before deepspeed.initialize "
            "torchao.float8.convert_to_float8_training converts your model"
        )
        return {"bf16": {"enabled": True}}
    return {}


def _optimizer(setup: Setup, zero: Mapping[str, Any]) -> dict[str, Any]:
    fused, given = setup.knob("fused_optimizer"), adamw(setup)
    if not given:
        if fused:
            setup.note(
                "fused_optimizer=true is your optimizer's: give deepspeed.initialize a "
                "torch.optim.AdamW(..., fused=True)"
            )
        return {}
    params = dict(given)
    if "offload_optimizer" in zero:
        setup.note("offload=optimizer: DeepSpeed updates by its own DeepSpeedCPUAdam, which it compiles at first use")
    else:
        # PyTorch's own, as it was measured: DeepSpeed's fused one has to be compiled.
        params["torch_adam"] = True
        if fused:
            params["fused"] = True
    return {"optimizer": {"type": "AdamW", "params": params}}


def _note_the_rest(setup: Setup) -> None:
    note_lora(setup)
    ratio = setup.knob("checkpoint_ratio")
    if ratio:
        setup.note(
            f"checkpoint_ratio={words(ratio)} is the model's: model.gradient_checkpointing_enable(), or "
            "deepspeed.checkpointing.checkpoint in your own blocks"
        )
    if setup.knob("fusion"):
        setup.note("fusion=true: call engine.compile() behind deepspeed.initialize; it compiles the whole model")
    if setup.device_type == "cpu" and setup.processes > 1:
        setup.note(
            "on CPUs DeepSpeed compiles its exchange over shared memory at the first start (some minutes) "
            "and keeps it in TORCH_EXTENSIONS_DIR; a start that was killed meanwhile leaves a lock there, "
            "for which the next one waits"
        )
    note_attention(setup, "from_pretrained(..., attn_implementation='{value}')")
    setup.note_unless_neutral("sequence_parallel", "AutoTP keeps activations whole")
    note_kernels(setup)


def _json(setup: Setup, comment: str) -> str:
    # JSON has no comments; DeepSpeed passes over keys that it does not know.
    said = {"_comment": comment.splitlines()} if comment else {}
    return json.dumps(said | config(setup), indent=2) + "\n"


def _start(setup: Setup, file: str) -> str:
    # DeepSpeed's own launcher would need a file of hosts and ssh between them; torchrun's variables will do.
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

# DeepSpeed: its JSON, which the command reads from `{trial_dir}`.
LAUNCHER = Launcher(
    name="deepspeed",
    knobs={"micro_batch": MICRO_BATCHES, "zero": (0, 1, 2, 3), "precision": ("fp32", "bf16")},
    paths={
        "micro_batch": "train_micro_batch_size_per_gpu={micro_batch}",
        "grad_accum": "gradient_accumulation_steps={grad_accum}",
        "zero": "zero_optimization.stage={zero}",
        "offload": "zero_optimization.offload_optimizer.device={'cpu' if offload == 'optimizer' else 'none'}",
        "precision": "bf16.enabled={precision == 'bf16'}",
    },
    sayable={"precision": ("fp32", "bf16")},
    several=("zero",),
)
