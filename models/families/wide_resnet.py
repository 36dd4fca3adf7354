"""Wide ResNet: blocks of two convolutions, cut by channels."""

from typing import TYPE_CHECKING

from .standard import StandardSchedule
from .tensor_parallel import Cuts, Regions, column_parallel, row_parallel

if TYPE_CHECKING:
    from ...schedule import Schedule


def cut(block: "Schedule", regions: Regions) -> None:
    """Cuts the first convolution and its norm by output channels, the second by input channels."""
    column_parallel(block["conv1"])
    block["norm2"].shard(["weight", "bias"], axis=0)
    row_parallel(block["conv2"])
    regions.around(block["conv1"], block["conv2"])


schedule = StandardSchedule(
    "blocks.*",
    Cuts(block=cut),
    no_sequence_parallel="images are not sequences of tokens",
    no_runs="its norms take the mean of a micro-batch",
)
