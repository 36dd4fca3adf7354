"""Lightning: a script on LightningCLI; how its data are batched is the script's own affair."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="lightning",
    knobs={
        "precision": ("fp32", "bf16"),
        "zero": (0, 3),
    },
    words={
        "precision": "--trainer.precision {'32-true' if precision == 'fp32' else '16-mixed' if precision == 'fp16' else "
        "'bf16-mixed'}",
        "zero": "--trainer.strategy {'fsdp' if zero == 3 else 'ddp'}",
        "grad_accum": "--trainer.accumulate_grad_batches {grad_accum}",
    },
    short=(
        "--trainer.default_root_dir {trial_dir} --trainer.max_steps 1000 --trainer.logger false "
        # Its default bar is rich's where that is installed, which shows nothing but in a terminal.
        "--trainer.callbacks+=TQDMProgressBar --trainer.enable_checkpointing false "
        "--trainer.limit_val_batches 0 --trainer.num_sanity_val_steps 0"
    ),
    sayable={"zero": (0, 3)},
    several=("zero",),
)
