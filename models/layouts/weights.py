"""Named tensors that lie somewhere, of which a rank reads its share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .lazy import Box, LazyTensor, LazyTensors, Stored

if TYPE_CHECKING:
    import torch


class Weights(ABC):
    """Weights of a model by the names that its constructor gives them, whatever the format they lie in.

    Tied weights are there under each of their names. What a model has and this has not (computed buffers, adapters of
    a base checkpoint) keeps its initial value.
    """

    shapes: "Mapping[str, tuple[torch.Size, torch.dtype]]"
    """Shape of every tensor as the model has it, and the dtype in which it is stored."""
    notes: tuple[str, ...] = ()
    """What a person should know of how they were read, a sentence each."""

    @abstractmethod
    def read(self, name: str, box: Box | None = None) -> "torch.Tensor":
        """A box of a tensor, or all of it: a copy on the CPU; no more of the file is read than the box needs.

        Raises:
            KeyError: there is no tensor of this name.
            ValueError: it is no box of this tensor.
            WorkloadError: the file is damaged.
        """


class LazyWeights(Weights):
    """Weights given as lazy tensors."""

    def __init__(self, tensors: LazyTensors, notes: tuple[str, ...] = ()) -> None:
        self.tensors = tensors
        self.notes = notes
        self.shapes = {name: (each.shape, each.dtype) for name, each in tensors.items()}

    def read(self, name: str, box: Box | None = None) -> "torch.Tensor":
        return self.tensors[name].read(box)


def lazy_tensors(weights: Weights) -> dict[str, LazyTensor]:
    """The tensors of any weights, as lazy ones."""
    if isinstance(weights, LazyWeights):
        return dict(weights.tensors)

    def stored(name: str) -> LazyTensor:
        shape, dtype = weights.shapes[name]
        return Stored(lambda box: weights.read(name, box), shape, dtype, fresh=True)

    return {name: stored(name) for name in weights.shapes}
