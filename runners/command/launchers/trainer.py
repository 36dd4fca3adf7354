"""transformers.Trainer: a script whose arguments are TrainingArguments, by HfArgumentParser."""

from .launcher import Launcher

BATCHES = (8, 1, 2, 4, 16, 32, 64)
LAUNCHER = Launcher(
    name="trainer",
    knobs={
        "micro_batch": BATCHES,
        "precision": ("fp32", "bf16"),
        "checkpoint_ratio": (0, 1),
        "fusion": (False, True),
        "optim": ("adamw_torch_fused", "adamw_torch"),
    },
    words={
        "micro_batch": "--per_device_train_batch_size {micro_batch}",
        "grad_accum": "--gradient_accumulation_steps {grad_accum}",
        "precision": "--bf16 {precision == 'bf16'} --fp16 {precision == 'fp16'}",
        "checkpoint_ratio": "--gradient_checkpointing {checkpoint_ratio == 1}",
        "fusion": "--torch_compile {fusion}",
        "kernels": "--use_liger_kernel {kernels}",
        "optim": "--optim {optim}",
    },
    short="--output_dir {trial_dir} --max_steps 1000 --save_strategy no --eval_strategy no --report_to none",
)
