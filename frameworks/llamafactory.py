"""LLaMA-Factory: `llamafactory-cli train FILE key=value ...`; what is set is the Trainer's."""

from .launcher import MICRO_BATCHES, Launcher

LAUNCHER = Launcher(
    name="llamafactory",
    knobs={
        "micro_batch": MICRO_BATCHES,
        "precision": ("fp32", "bf16"),
        "checkpoint_ratio": (1, 0),
        "kernels": (False, True),
    },
    words={
        "micro_batch": "per_device_train_batch_size={micro_batch}",
        "grad_accum": "gradient_accumulation_steps={grad_accum}",
        "precision": "bf16={precision == 'bf16'} fp16={precision == 'fp16'}",
        "checkpoint_ratio": "disable_gradient_checkpointing={checkpoint_ratio == 0}",
        "kernels": "enable_liger_kernel={kernels}",
    },
    # Its values are read as YAML, where a bare `no` is false.
    short=(
        "output_dir={trial_dir} max_steps=1000 save_strategy='\"no\"' eval_strategy='\"no\"' report_to=none plot_loss=false"
    ),
)
