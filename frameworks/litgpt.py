"""LitGPT: `litgpt pretrain MODEL ...` and `litgpt finetune_lora MODEL ...`, and their YAML."""

from typing import Any

from ..knobs.strategy import Strategy
from .common import note_quantized, read_lora
from .framework import Framework, KnobSettings, KnobTable, SettingsReader
from .launcher import MICRO_BATCHES, Launcher

_TOTAL = "train.global_batch_size"
KNOBS = KnobTable(
    KnobSettings(knob="micro_batch", keys=("train.micro_batch_size",)),
    KnobSettings(
        knob="precision",
        alternatives=(
            {
                "fp32": {"precision": "32-true"},
                "bf16": {"precision": "bf16-mixed"},
                "bf16_pure": {"precision": "bf16-true"},
                "fp16": {"precision": "16-mixed"},
            },
        ),
    ),
)
"""LitGPT's names of the knobs; it uses FSDP whenever there are several devices."""

_ADAPTED = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": ("lm_head",),
}
"""Layers with adapters by LitGPT's flags, with the names of Llama in transformers."""
_ADAPTED_BY_DEFAULT = ("lora_query", "lora_value")


def read(reader: SettingsReader) -> None:
    """Reads the batch, with the subcommand's defaults (TrainArgs), the devices, the adapters, and recomputation, which
    finetuning by FSDP has for each block (litgpt/finetune).
    """
    command = str(reader.get("subcommand") or "")
    finetunes = command.startswith("finetune") or reader.has("lora_r")
    reader.knobs.setdefault("micro_batch", 1 if finetunes else 4)
    if (total := reader.whole(_TOTAL)) is not None or command:
        reader.facts["global_batch"] = total or (16 if finetunes else 512)
    devices, hosts = reader.whole("devices"), reader.whole("num_nodes") or 1
    if devices is not None:
        reader.facts |= {"devices": devices * hosts, "per_host": devices}
    if command in ("finetune", "finetune_lora") or reader.has("lora_r"):
        chosen = [
            layer
            for name, layers in _ADAPTED.items()
            for layer in layers
            if (name in _ADAPTED_BY_DEFAULT if (flag := reader.flag(name)) is None else flag)
        ]
        read_lora(reader, reader.whole("lora_r") or 8, chosen, reader.whole("lora_alpha") or 16)
    note_quantized(reader, "quantize")
    if finetunes and (devices or 1) * hosts > 1:
        reader.knobs["checkpoint_ratio"] = 1  # activation_checkpointing_policy={Block}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch."""
    return {_TOTAL: strategy.micro_batch * strategy.grad_accum * strategy.dp}


LAUNCHER = Launcher(
    name="litgpt",
    knobs={"micro_batch": MICRO_BATCHES, "precision": ("fp32", "bf16", "bf16_pure")},
    options=KNOBS.options("--{} {}", {"micro_batch": None, "precision": ("fp32", "bf16", "bf16_pure")})
    | {"grad_accum": f"--{_TOTAL} {{global_batch}}"},
    accepts={"precision": ("fp32", "bf16", "bf16_pure")},
    total=f"--{_TOTAL}",
    own_total=True,
    short="--train.log_interval 1",
    bounds=(
        "--out_dir {trial_dir} --train.save_interval 1000000 --eval.interval 1000000 --eval.initial_validation false "
        "--eval.final_validation false --logger_name csv"
    ),
    undone=("--resume VALUE",),
)
FRAMEWORK = Framework(
    name="litgpt",
    title="LitGPT",
    knobs=KNOBS,
    signs=(
        *(
            "train.micro_batch_size",
            "train.global_batch_size",
            "train.max_seq_length",
            "train.max_tokens",
            "checkpoint_dir",
        ),
        *(
            "train.lr_warmup_steps",
            "tokenizer_dir",
            "initial_checkpoint_dir",
            "train.save_interval",
            "lora_r",
            "eval.interval",
        ),
        *("model_name", "out_dir", "precision", "num_nodes"),
    ),
    programs=("litgpt",),
    model=("model_name", "checkpoint_dir"),
    seq_len=("train.max_seq_length",),
    defaults={"precision": "bf16_pure", "zero": 3, "checkpoint_ratio": 0},
    read=read,
    write=write,
)
