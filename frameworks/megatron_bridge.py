"""Megatron-Bridge: a recipe's script with `section.field=value`, which is Megatron-LM's own configuration."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="megatron-bridge",
    knobs={"micro_batch": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4)},
    words={
        "micro_batch": "train.micro_batch_size={micro_batch}",
        "grad_accum": "train.global_batch_size={global_batch}",
        "tp": "model.tensor_model_parallel_size={tp}",
        "pp": "model.pipeline_model_parallel_size={pp}",
        "cp": "model.context_parallel_size={cp}",
        "sequence_parallel": "model.sequence_parallel={sequence_parallel}",
    },
    short="train.train_iters=1000 train.eval_iters=0 logger.log_interval=1 checkpoint.save={trial_dir}",
    total="train.global_batch_size",
    own_total=True,
    several=("tp", "pp"),
)
