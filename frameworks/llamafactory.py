"""LLaMA-Factory: `llamafactory-cli train FILE key=value ...`; arguments of the Trainer, and some of its own."""

from .common import note_quantized, note_stage, read_lora
from .framework import Framework, KnobSettings, KnobTable, SettingsReader
from .launcher import MICRO_BATCHES, Launcher
from .trainer import KNOBS as TRAINER, conventions, prepare, read as read_trainer, write as write_trainer

KNOBS = KnobTable(
    *(
        TRAINER[knob]
        for knob in ("micro_batch", "grad_accum", "precision", "fusion", "fused_optimizer", "zero", "offload")
    ),
    KnobSettings(
        knob="checkpoint_ratio",
        alternatives=({1: {"disable_gradient_checkpointing": False}, 0: {"disable_gradient_checkpointing": True}},),
    ),
    KnobSettings(
        knob="kernels", alternatives=({False: {"enable_liger_kernel": False}, True: {"enable_liger_kernel": True}},)
    ),
    KnobSettings(
        knob="attention",
        alternatives=(
            {
                "eager": {"flash_attn": "disabled"},
                "sdpa": {"flash_attn": "sdpa"},
                "flash_attention_2": {"flash_attn": "fa2"},
            },
        ),
    ),
)
"""LLaMA-Factory's names of the knobs; by default it recomputes every block."""


def read(reader: SettingsReader) -> None:
    """Reads the Trainer's arguments, and the adapters; LLaMA-Factory's own defaults are in its hparams."""
    read_trainer(reader)
    reader.facts.setdefault("seq_len", 2048)
    note_stage(reader, "stage")
    kind = reader.get("finetuning_type") or "lora"
    if kind not in ("lora", "full"):
        reader.note(f"finetuning_type = {kind}: the estimate trains all weights")
    if lora := kind == "lora":
        read_lora(reader, reader.whole("lora_rank") or 8, reader.get("lora_target"), reader.whole("lora_alpha"))
    # Weights are loaded in the format of the products; those that are trained, adapters aside, get a copy in float32.
    if reader.flag("pure_bf16") or (lora and reader.knobs.get("precision") == "bf16"):
        reader.conventions["precision"] = "bf16_pure"
    note_quantized(reader, "quantization_bit")


# Its values are parsed as YAML, where a bare `no` is false.
_BOUNDS = (
    "output_dir={trial_dir} save_strategy='\"no\"' eval_strategy='\"no\"' eval_on_start=false report_to=none "
    "push_to_hub=false plot_loss=false load_best_model_at_end=false predict_with_generate=false"
)
LAUNCHER = Launcher(
    name="llamafactory",
    knobs={
        "micro_batch": MICRO_BATCHES,
        "precision": ("fp32", "bf16"),
        "checkpoint_ratio": (1, 0),
        "kernels": (False, True),
    },
    options=KNOBS.options(
        "{}={}",
        {
            **dict.fromkeys(("micro_batch", "grad_accum", "checkpoint_ratio", "kernels")),
            "precision": ("fp32", "bf16", "fp16"),
        },
    ),
    short="max_steps=1000",
    bounds=_BOUNDS,
    undone=("resume_from_checkpoint=VALUE",),
)
FRAMEWORK = Framework(
    name="llamafactory",
    title="LLaMA-Factory",
    knobs=KNOBS,
    partly=frozenset({"checkpoint_ratio"}),
    signs=(
        *(
            "finetuning_type",
            "cutoff_len",
            "stage",
            "template",
            "dataset_dir",
            "disable_gradient_checkpointing",
            "plot_loss",
        ),
        *(
            "per_device_train_batch_size",
            "enable_liger_kernel",
            "flash_attn",
            "lora_rank",
            "lora_target",
            "overwrite_cache",
        ),
    ),
    programs=("llamafactory-cli", "llamafactory", "train_bash.py", "lmf"),
    model=("model_name_or_path",),
    seq_len=("cutoff_len",),
    defaults={"micro_batch": 8, "grad_accum": 1, "precision": "fp32", "checkpoint_ratio": 1, "fused_optimizer": True},
    prepare=prepare,
    conventions=conventions,
    read=read,
    write=write_trainer,
    option="{key}={value}",
)
