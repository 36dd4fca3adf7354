"""NeMo 2: `nemo llm pretrain --factory RECIPE field=value`."""

from .launcher import Launcher

LAUNCHER = Launcher(
    name="nemo",
    knobs={"micro_batch": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4)},
    words={
        "micro_batch": "data.micro_batch_size={micro_batch}",
        "grad_accum": "data.global_batch_size={global_batch}",
        "tp": "trainer.strategy.tensor_model_parallel_size={tp}",
        "pp": "trainer.strategy.pipeline_model_parallel_size={pp}",
        "cp": "trainer.strategy.context_parallel_size={cp}",
        "sequence_parallel": "trainer.strategy.sequence_parallel={sequence_parallel}",
    },
    # It asks whether to go on.
    short="--yes trainer.max_steps=1000 trainer.limit_val_batches=0 trainer.log_every_n_steps=1 log.log_dir={trial_dir}",
    total="data.global_batch_size",
    own_total=True,
    several=("tp", "pp"),
)
