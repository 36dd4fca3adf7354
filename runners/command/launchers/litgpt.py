"""LitGPT: `litgpt pretrain MODEL ...` and `litgpt finetune_lora MODEL ...`."""

from .launcher import Launcher
from .trainer import BATCHES

LAUNCHER = Launcher(
    name="litgpt",
    knobs={"micro_batch": BATCHES, "precision": ("32-true", "bf16-true", "bf16-mixed")},
    words={"micro_batch": "--train.micro_batch_size {micro_batch}", "precision": "--precision {precision}"},
    short="--out_dir {trial_dir} --train.log_interval 1 --train.save_interval 1000000 --eval.interval 1000000",
)
