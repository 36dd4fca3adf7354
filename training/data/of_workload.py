"""The data of a training: files, or what the workload itself makes."""

from pathlib import Path

from ...base.errors import WorkloadError
from ...models.data import TokenBatches
from ...models.workload import Workload
from .from_workload import FromWorkload
from .plan import DataPlan
from .preparing import Heard, prepare
from .samples import TrainingData


def training_data(plan: DataPlan, workload: Workload, cache: Path, heard: Heard = lambda share: None) -> TrainingData:
    """What a workload is trained on.

    Args:
        plan: what is asked; without paths it is the workload's own data.
        workload: what is trained.
        cache: a folder for tokens.
        heard: told now and then which share of files that are read for the first time is read, from 0 to 1.

    Raises:
        WorkloadError: as `prepare`; files are given for a workload that makes its own batches.
    """
    batch = workload.batch
    if not plan.paths:
        return FromWorkload(workload, seed=plan.seed, num_evaluation=4 * workload.global_batch)
    if not isinstance(batch, TokenBatches):
        raise WorkloadError(
            f"{workload.name} makes its own batches, which files do not replace: leave --data out, or read them in its batch "
            "function"
        )
    return prepare(
        plan, seq_len=batch.seq_len, task=batch.task, vocab_size=batch.vocab_size, cache=cache, pad_id=batch.pad_id,
        heard=heard,
    )  # fmt: skip
