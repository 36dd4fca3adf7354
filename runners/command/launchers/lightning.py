"""Lightning: a script on LightningCLI; how its data are batched is the script's own affair."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="lightning",
    knobs={
        "precision": ("32-true", "bf16-mixed"),
        "strategy": ("ddp", "fsdp"),
    },
    words={
        "precision": "--trainer.precision {precision}",
        "strategy": "--trainer.strategy {strategy}",
        "grad_accum": "--trainer.accumulate_grad_batches {grad_accum}",
    },
    short=(
        "--trainer.default_root_dir {trial_dir} --trainer.max_steps 1000 --trainer.logger false "
        # Its default bar is rich's where that is installed, which shows nothing but in a terminal.
        "--trainer.callbacks+=TQDMProgressBar --trainer.enable_checkpointing false "
        "--trainer.limit_val_batches 0 --trainer.num_sanity_val_steps 0"
    ),
    several=("strategy",),
)
