"""What every family's schedule does with the standard knobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...schedule import Schedule


KNOBS = ("checkpoint_ratio", "fusion")
"""Knobs that rewrite the model, and that a StandardSchedule follows."""


@dataclass(frozen=True)
class StandardSchedule:
    """`schedule(sch, config)`: checkpoints a share of the repeated blocks and compiles each of them in place.

    A model without repeated blocks is compiled as a whole.
    """

    blocks: "Callable[[Schedule], list[Schedule]]"
    """The repeated blocks of a model, in order."""

    def __call__(self, sch: "Schedule", config: Mapping[str, Any]) -> None:
        blocks = self.blocks(sch)
        for index in spread(len(blocks), config.get("checkpoint_ratio", 0)):
            blocks[index].checkpoint()
        if config.get("fusion", False):
            for block in blocks or [sch]:
                # Shapes do not change in training, so nothing is gained by code for any shape.
                block.compile(dynamic=False)


def spread(count: int, ratio: float) -> list[int]:
    """Indices of `round(ratio * count)` of `count` blocks, spread evenly.

    >>> spread(4, 0.5), spread(12, 0.25)
    ([1, 3], [3, 7, 11])
    """
    chosen = round(ratio * count)
    return [index for index in range(count) if (index + 1) * chosen // count > index * chosen // count]
