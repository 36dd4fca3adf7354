"""accelerate: `accelerate launch OPTIONS script.py ...`; the micro-batch is the script's own affair."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="accelerate",
    after="launch",
    knobs={"precision": ("no", "bf16"), "fusion": ("no", "inductor")},
    words={
        "precision": "--mixed_precision {precision}",
        "fusion": "--dynamo_backend {fusion}",
        "grad_accum": "--gradient_accumulation_steps {grad_accum}",
    },
)
