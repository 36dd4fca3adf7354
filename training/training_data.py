"""The source of a training's batches, and the number of tokens that a batch predicts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..models.data import Task
from ..models.workload import Batch

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a token that is not predicted, as in transformers."""


class TrainingData(Protocol):
    """Source of a training's batches. Step s of a training with B samples per step uses positions from s * B on."""

    @property
    def num_training(self) -> int | None:
        """Number of samples of an epoch; None if no sample occurs twice."""

    @property
    def num_evaluation(self) -> int:
        """Number of samples held out for evaluation."""

    @property
    def even(self) -> bool:
        """True if all samples have the same number of labels, so that the mean over a batch is the mean over its
        micro-batches.
        """

    @property
    def in_main_thread(self) -> bool:
        """True if samples may only be made in the main thread, between steps: they use torch's global generators."""

    def __call__(self, start: int, count: int) -> Batch:
        """The samples at these positions, as a batch on the CPU."""

    def evaluation(self, start: int, count: int) -> Batch:
        """Held-out samples by number, as a batch on the CPU.

        Raises:
            IndexError: there are fewer samples.
        """

    def describe(self) -> dict[str, Any]:
        """Description of the data, JSON-ready. Trainings with the same `digest` have the same batches at the same
        positions.
        """


def num_predicted(task: Task, batch: Batch) -> "torch.Tensor":
    """Number of predicted tokens of a batch, a scalar on its device: the number of terms of its mean loss.

    If samples are not `even`, the mean over a batch is the mean over its micro-batches weighted by this number.
    """
    assert isinstance(batch, Mapping), "samples of tokens are mappings"
    labels = batch["labels"]
    # Labels of causal models are shifted by one: the first token of a sample is not predicted.
    return ((labels[:, 1:] if task == "causal" else labels) != IGNORED).sum()
