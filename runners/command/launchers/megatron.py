"""Megatron-LM: `torchrun ... pretrain_gpt.py ...`."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="megatron",
    knobs={"micro_batch": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4)},
    words={
        "micro_batch": "--micro-batch-size {micro_batch}",
        "grad_accum": "--global-batch-size {global_batch}",
        "tp": "--tensor-model-parallel-size {tp}",
        "pp": "--pipeline-model-parallel-size {pp}",
        "cp": "--context-parallel-size {cp}",
    },
    short="--train-iters 1000 --eval-iters 0 --log-interval 1",
    instead={"--train-iters": "--train-samples"},
    total="--global-batch-size",
    several=("tp", "pp"),
)
