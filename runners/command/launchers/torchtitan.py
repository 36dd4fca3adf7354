"""torchtitan: `torchrun ... -m torchtitan.train --module ... --config ...`."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="torchtitan",
    knobs={
        "micro_batch": (1, 2, 4, 8, 16),
        "tp": (1, 2, 4, 8),
        "pp": (1, 2, 4),
    },
    words={
        "micro_batch": "--training.local_batch_size {micro_batch}",
        "grad_accum": "--training.global_batch_size {global_batch}",
        "tp": "--parallelism.tensor_parallel_degree {tp}",
        "pp": "--parallelism.pipeline_parallel_degree {pp}",
        "cp": "--parallelism.context_parallel_degree {cp}",
    },
    short="--dump_folder {trial_dir} --training.steps 1000 --metrics.log_freq 1",
    total="--training.global_batch_size",
    several=("tp", "pp"),
)
