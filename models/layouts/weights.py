"""Named tensors on disk, checked against a model's names and shapes; each rank reads its share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base._transformers import may_be_left, may_be_missing, tied
from ...base.errors import WorkloadError
from .lazy import Box, LazyTensors, narrow

if TYPE_CHECKING:
    import torch


class Weights:
    """Weights of a model by the names of its constructor, regardless of their storage format.

    Tied weights are available under each of their names. Tensors of the model that are missing here (computed buffers,
    adapters of a base checkpoint) keep their initial values.

    Args:
        tensors: the tensors by name.
        notes: notes for the user, one sentence each.
    """

    def __init__(self, tensors: LazyTensors, notes: tuple[str, ...] = ()) -> None:
        self.tensors, self.notes = dict(tensors), notes
        self.shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        """Shape of every tensor in the model, and its stored dtype."""

    def read(self, name: str, box: Box | None = None) -> "torch.Tensor":
        """Returns a box of a tensor, or all of it: a copy on the CPU. No more of the file is read than the box needs.

        Raises:
            KeyError: no tensor has this name.
            ValueError: it is not a box of this tensor.
            WorkloadError: the file is damaged.
        """
        return self.tensors[name].read(box)


_SHOWN = 5
"""Number of names of a kind that a message lists."""


def fit(
    candidates: LazyTensors, model: Any, location: str, *, unexpected: Iterable[str] = (), hint: str = ""
) -> Weights:
    """Returns the weights of a model from tensors by its names.

    Args:
        candidates: tensors by the model's names.
        model: a transformers model, which may be on the meta device.
        location: of the tensors, for messages.
        unexpected: names of tensors that the model does not have.

    Raises:
        WorkloadError: tensors are missing, of another shape, or of repeated blocks that the model does not have.
    """
    notes: list[str] = []
    state = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {name: tensor for name, tensor in candidates.items() if name in state}
    unused = [*unexpected, *(name for name in candidates if name not in state)]
    vocabulary = _vocabulary(model)
    unlike_shapes: list[str] = []
    for name, tensor in list(tensors.items()):
        shape = state[name].shape
        if tensor.shape == shape:
            continue
        if name in vocabulary and tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
            tensors[name] = narrow(tensor, 0, 0, shape[0])
            notes.append(
                f"{location}: {name} has {tensor.shape[0]} rows and the model's vocabulary {shape[0]}; the first "
                f"{shape[0]} were taken"
            )
        else:
            unlike_shapes.append(unlike(name, tensor.shape, shape))
    for names in tied(model):
        shared = next((name for name in names if name in tensors), None)
        tensors |= {name: tensors[shared] for name in names if shared is not None}
    missing = [
        name for name in state if name not in tensors and name not in buffers and not may_be_missing(model, name)
    ]
    unused = [name for name in unused if name not in buffers and not may_be_left(model, name)]
    # Tensors outside the blocks (another head, a pooler) do not affect the rest.
    harmless = [name for name in unused if not re.search(r"\.\d+\.", name)]
    if missing or unlike_shapes or len(harmless) < len(unused):
        raise WorkloadError(_of_another(location, model, missing, unused, unlike_shapes, hint))
    if unused:
        notes.append(f"{location}: {_some(unused)} left out, for which the model has no place")
    return Weights({name: tensors[name] for name in state if name in tensors}, tuple(notes))


def _vocabulary(model: Any) -> set[str]:
    """Names of parameters with a row for each token."""
    embeddings = [
        module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None
    ]
    token_parameters = {id(parameter) for module in embeddings for parameter in module.parameters(recurse=False)}
    return {
        name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in token_parameters
    }


def _of_another(
    location: str, model: Any, missing: list[str], unused: list[str], unlike_shapes: list[str], hint: str
) -> str:
    return (
        f"{location} is a checkpoint of another model than this {model.config.model_type} ({type(model).__name__})."
        f"{' ' + hint if hint else ''} {differences(missing, unused, unlike_shapes)} Give the model that it was saved from, or "
        "another checkpoint"
    )


def differences(missing: Sequence[str], unused: Sequence[str], unlike_shapes: Sequence[str]) -> str:
    """Describes the differing tensors of a checkpoint and a model: number and first names of each kind.

    Args:
        unused: tensors missing in the model.
        unlike_shapes: tensors of another shape, with both shapes.
    """
    kinds = ((missing, "is", "missing"), (unused, "is", "not in the model"), (unlike_shapes, "has", "another shape"))
    sentences = []
    for names, verb, problem in kinds:
        if names:
            plural_verb = {"is": "are", "has": "have"}[verb]
            count = f"{len(names)} tensors {plural_verb}" if len(names) > 1 else f"1 tensor {verb}"
            further = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            sentences.append(f"{count} {problem}: {'; '.join(names[:_SHOWN])}{further}.")
    return " ".join(sentences)


def shape_differences(expected: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]]) -> str:
    """Describes the differences of a checkpoint's shapes, by name, from a model's; empty if there is none."""
    missing = [name for name in expected if name not in actual]
    unused = [name for name in actual if name not in expected]
    pairs = ((name, tuple(actual[name]), tuple(expected[name])) for name in expected if name in actual)
    return differences(missing, unused, [unlike(*pair) for pair in pairs if pair[1] != pair[2]])


def unlike(name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    """Describes a tensor with another shape in a checkpoint than in the model."""
    return f"{name} with {tuple(stored)} there, {tuple(expected)} in the model"


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:_SHOWN])
    if len(names) == 1:
        return f"{listed} was"
    return f"{listed}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''} were"
