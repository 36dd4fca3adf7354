"""DeepSpeed: its JSON, which the command reads from `{trial_dir}`."""

from .launcher import Launcher
from .trainer import BATCHES

LAUNCHER = Launcher(
    name="deepspeed",
    knobs={"micro_batch": BATCHES, "zero": (0, 1, 2, 3), "precision": ("fp32", "bf16")},
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
