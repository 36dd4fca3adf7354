"""Common part of the layouts of Megatron-LM and torchtitan: a model's tensors by other names and in other shapes."""

from abc import ABC, abstractmethod
from typing import Any

from ...base.errors import WorkloadError, unknown
from ..architecture import Architecture, without_memory
from ..lora import AdaptedArchitecture
from .adapters import is_adapter
from .hugging_face import plain
from .lazy import LazyTensor, LazyTensors, Zeros
from .weights import Weights, differences, fit, unlike


class Layout(ABC):
    """Another tool's names and shapes of supported models, in both directions.

    Raises:
        WorkloadError: the tool does not support the model, or its settings.
    """

    tool: str
    """Name for messages."""
    families: tuple[str, ...]
    """Supported model types."""
    vocabulary: tuple[str, ...]
    """The tool's names of tensors with a row for each token, which may be padded."""

    def __init__(self, architecture: Architecture) -> None:
        if architecture.model_type not in self.families or architecture.task != "causal":
            problem = unknown(f"model of {self.tool}", architecture.model_type, self.families)
            raise WorkloadError(f"{problem} Other models convert with --to hf")
        self.architecture = plain(architecture)
        self.model: Any = without_memory(self.architecture)
        self.settings: Any = self.model.config
        self.refuse()

    def refuse(self) -> None:
        """Refuses settings that the tool's model does not support.

        Raises:
            WorkloadError: there are such settings.
        """

    @abstractmethod
    def to_tool(self, tensors: LazyTensors) -> dict[str, LazyTensor]:
        """Converts tensors to the tool's form, without padding of the vocabulary."""

    @abstractmethod
    def from_tool(self, stored: LazyTensors) -> dict[str, LazyTensor]:
        """Converts tensors to the model's form, with the vocabulary as stored."""

    def read(self, stored: LazyTensors, where: str) -> Weights:
        """Returns the weights of the model from tensors by the tool's names.

        Raises:
            WorkloadError: they are another model's; the message lists the differing tensors by the tool's names.
        """
        expected = self.to_tool({name: Zeros(each.shape, each.dtype) for name, each in self.model.state_dict().items()})
        missing = [name for name in expected if name not in stored]
        left = [name for name in stored if name not in expected]
        wrong = [
            unlike(name, stored[name].shape, each.shape)
            for name, each in expected.items()
            if name in stored and not self._fits(name, stored[name], each)
        ]
        if missing or left or wrong:
            raise WorkloadError(
                f"{where} is a checkpoint of another model than this {self.architecture.model_type}, by {self.tool}'s "
                f"names: {differences(missing, left, wrong)} Give the model that it was saved from"
            )
        return fit(self.from_tool(stored), self.model, where)

    def given(self, weights: Weights, architecture: Architecture) -> dict[str, LazyTensor]:
        """Returns the tensors in the tool's form.

        Raises:
            WorkloadError: they are not the model's, or include adapters.
        """
        tensors = weights.tensors
        if isinstance(architecture, AdaptedArchitecture) and any(is_adapter(name) for name in tensors):
            raise WorkloadError(
                f"{self.tool} keeps no adapters beside weights: merge them first (redline convert --merge)"
            )
        return self.to_tool(fit(tensors, self.model, "what was given").tensors)

    def _fits(self, name: str, stored: LazyTensor, expected: LazyTensor) -> bool:
        if name in self.vocabulary:
            return stored.shape[1:] == expected.shape[1:] and stored.shape[0] >= expected.shape[0]
        return stored.shape == expected.shape
