"""parallel_loss: cross-entropy of logits that are cut over the vocabulary."""

from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError
from ..fused_logits import FusedLogits
from ..graph.called import check_called
from ..parallel.sharding import shards_of
from ..parallel.vocabulary import SplitLogits
from ..primitive import primitive
from ..tree import ScheduledModule
from .kinds import output_of
from .shard import tensor_parallel


@primitive
def parallel_loss(sch: ScheduledModule) -> None:
    """Leaves this module's logits cut over the vocabulary and computes their cross-entropy from the pieces.

    For a language-model head whose weight is cut along its output. The model's own loss code need not know:
    `torch.nn.functional.cross_entropy` of these logits exchanges a maximum and two sums a token rather than
    the logits.

    Raises:
        ScheduleError: no `tp` axis; the module's weight is not cut along its output.
    """
    ranks = tensor_parallel(sch, "parallel_loss")
    if output_of(sch.module) != "split":
        raise ScheduleError(
            f"parallel_loss on '{sch.name}': its weight must be cut along the output (the vocabulary); shard it first"
        )
    check_called(sch, "parallel_loss")
    cut = shards_of(sch.module)["weight"]
    sch.module.register_forward_hook(_Split(ranks, cut.shape[cut.dim]))


class _Split:
    def __init__(self, axis: Any, vocabulary: int) -> None:
        self.axis = axis
        self.vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if isinstance(output, FusedLogits):
            return output.cut(self.axis, self.vocabulary)
        return SplitLogits.of(output, self.axis, self.vocabulary)
