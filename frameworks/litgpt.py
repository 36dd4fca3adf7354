"""LitGPT: `litgpt pretrain MODEL ...` and `litgpt finetune_lora MODEL ...`."""

from .launcher import MICRO_BATCHES, Launcher

LAUNCHER = Launcher(
    name="litgpt",
    knobs={"micro_batch": MICRO_BATCHES, "precision": ("fp32", "bf16", "bf16_pure")},
    words={
        "micro_batch": "--train.micro_batch_size {micro_batch}",
        "grad_accum": "--train.global_batch_size {global_batch}",
        "precision": (
            "--precision {'32-true' if precision == 'fp32' else 'bf16-mixed' if precision == 'bf16' else 'bf16-true'}"
        ),
    },
    sayable={"precision": ("fp32", "bf16", "bf16_pure")},
    total="--train.global_batch_size",
    own_total=True,
    short="--out_dir {trial_dir} --train.log_interval 1 --train.save_interval 1000000 --eval.interval 1000000",
)
