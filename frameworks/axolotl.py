"""axolotl: `axolotl train config.yml`; its options stand behind `train`, what is behind ` -- ` is its own launcher's."""

from .launcher import MICRO_BATCHES, Launcher

LAUNCHER = Launcher(
    name="axolotl",
    after="train",
    knobs={"micro_batch": MICRO_BATCHES, "precision": ("fp32", "bf16"), "checkpoint_ratio": (0, 1)},
    words={
        "micro_batch": "--micro-batch-size {micro_batch}",
        "grad_accum": "--gradient-accumulation-steps {grad_accum}",
        "precision": "--bf16 {precision == 'bf16'}",
        "checkpoint_ratio": "--gradient-checkpointing {checkpoint_ratio == 1}",
        "fusion": "--torch-compile {fusion}",
    },
    sayable={"precision": ("fp32", "bf16")},
    short="--output-dir {trial_dir} --max-steps 1000 --val-set-size 0",
)
