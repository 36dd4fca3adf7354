"""accelerate: `accelerate launch OPTIONS script.py ...`; the micro-batch is the script's own affair."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="accelerate",
    after="launch",
    knobs={"precision": ("fp32", "bf16"), "fusion": (False, True)},
    words={
        "precision": "--mixed_precision {'no' if precision == 'fp32' else precision}",
        "fusion": "--dynamo_backend {'inductor' if fusion else 'no'}",
        "grad_accum": "--gradient_accumulation_steps {grad_accum}",
    },
)
