"""Named tensors on disk, checked against a model's names and shapes; each rank reads its share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base._transformers import may_be_left, may_be_missing, tied
from ...base.errors import WorkloadError
from .lazy import LazyTensors

if TYPE_CHECKING:
    import torch

_SHOWN = 5
"""Number of names of a kind that a message lists."""


@dataclass(frozen=True)
class Weights:
    """Weights of a model by the names of its constructor, regardless of their storage format.

    Tied weights are available under each of their names. Tensors of the model that are missing here (computed buffers,
    adapters of a base checkpoint) keep their initial values.
    """

    tensors: LazyTensors
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""

    @property
    def dtype(self) -> "torch.dtype | None":
        """Floating-point dtype of most entries; None without any."""
        entries: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                entries[tensor.dtype] = entries.get(tensor.dtype, 0) + tensor.shape.numel()
        return max(entries, key=lambda dtype: entries[dtype], default=None)


def fit(
    candidates: LazyTensors, model: Any, location: str, *, unexpected: Iterable[str] = (), hint: str = ""
) -> Weights:
    """Returns the weights of a model from tensors by its names.

    Args:
        candidates: tensors by the model's names.
        model: a transformers model, which may be on the meta device.
        location: of the tensors, for messages.
        unexpected: names of tensors that the model does not have.
        hint: a sentence for the message if they are of another model.

    Raises:
        WorkloadError: tensors are missing, of another shape, or of repeated blocks that the model does not have.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {name: tensor for name, tensor in candidates.items() if name in shapes}
    for names in tied(model):
        shared = next((tensors[name] for name in names if name in tensors), None)
        tensors |= dict.fromkeys(names, shared) if shared is not None else {}
    unused = [*unexpected, *(name for name in candidates if name not in shapes)]
    unused = [name for name in unused if name not in buffers and not may_be_left(model, name)]
    required = {
        name: shape
        for name, shape in shapes.items()
        if name in tensors or not (name in buffers or may_be_missing(model, name))
    }
    # Tensors outside the blocks (another head, a pooler) do not affect the rest.
    of_blocks = any(re.search(r"\.\d+\.", name) for name in unused)
    stored = {name: tensor.shape for name, tensor in tensors.items()} | dict.fromkeys(unused if of_blocks else (), ())
    if differences := shape_differences(required, stored):
        raise WorkloadError(
            f"{location} is a checkpoint of another model than this {model.config.model_type} ({type(model).__name__})."
            f"{' ' + hint if hint else ''} {differences} Give the model that it was saved from, or another checkpoint"
        )
    notes: tuple[str, ...] = ()
    if unused:
        further = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        verb = "was" if len(unused) == 1 else "were"
        left_out = f"{', '.join(unused[:_SHOWN])}{further} {verb} left out"
        notes = (f"{location}: {left_out}, for which the model has no place",)
    return Weights({name: tensors[name] for name in shapes if name in tensors}, notes)


def shape_differences(expected: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]]) -> str:
    """Describes how a checkpoint's shapes, by name, differ from a model's: number and first names of each kind; empty if
    they do not.
    """
    unlike = [
        f"{name} with {tuple(actual[name])} there, {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    kinds = (
        ([name for name in expected if name not in actual], "is", "are", "missing"),
        ([name for name in actual if name not in expected], "is", "are", "not in the model"),
        (unlike, "has", "have", "another shape"),
    )
    sentences = []
    for names, singular, plural, problem in kinds:
        if names:
            count = f"{len(names)} tensors {plural}" if len(names) > 1 else f"1 tensor {singular}"
            further = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            sentences.append(f"{count} {problem}: {'; '.join(names[:_SHOWN])}{further}.")
    return " ".join(sentences)
