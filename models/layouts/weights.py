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
        self.shapes = {name: (each.shape, each.dtype) for name, each in tensors.items()}
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


def fit(found: LazyTensors, model: Any, where: str, *, unexpected: Iterable[str] = (), hint: str = "") -> Weights:
    """Returns the weights of a model from tensors by its names.

    Args:
        found: tensors by the model's names.
        model: a transformers model, which may be on the meta device.
        where: location of the tensors, for messages.
        unexpected: names of tensors that the model does not have.

    Raises:
        WorkloadError: tensors are missing, of another shape, or of repeated blocks that the model does not have.
    """
    notes: list[str] = []
    own = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {name: each for name, each in found.items() if name in own}
    left = [*unexpected, *(name for name in found if name not in own)]
    vocabulary = _vocabulary(model)
    wrong: list[str] = []
    for name, each in list(tensors.items()):
        shape = own[name].shape
        if each.shape == shape:
            continue
        if name in vocabulary and each.shape[1:] == shape[1:] and each.shape[0] > shape[0]:
            tensors[name] = narrow(each, 0, 0, shape[0])
            notes.append(
                f"{where}: {name} has {each.shape[0]} rows and the model's vocabulary {shape[0]}; the first "
                f"{shape[0]} were taken"
            )
        else:
            wrong.append(unlike(name, each.shape, shape))
    for names in tied(model):
        first = next((each for each in names if each in tensors), None)
        tensors |= {each: tensors[first] for each in names if first is not None}
    missing = [each for each in own if each not in tensors and each not in buffers and not may_be_missing(model, each)]
    left = [each for each in left if each not in buffers and not may_be_left(model, each)]
    # Tensors outside the blocks (another head, a pooler) do not affect the rest.
    harmless = [each for each in left if not re.search(r"\.\d+\.", each)]
    if missing or wrong or len(harmless) < len(left):
        raise WorkloadError(_of_another(where, model, missing, left, wrong, hint))
    if left:
        notes.append(f"{where}: {_some(left)} left out, for which the model has no place")
    return Weights({name: tensors[name] for name in own if name in tensors}, tuple(notes))


def _vocabulary(model: Any) -> set[str]:
    """Names of parameters with a row for each token."""
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {id(each) for module in ends for each in module.parameters(recurse=False)}
    return {name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in own}


def _of_another(where: str, model: Any, missing: list[str], left: list[str], wrong: list[str], hint: str) -> str:
    return (
        f"{where} is a checkpoint of another model than this {model.config.model_type} ({type(model).__name__})."
        f"{' ' + hint if hint else ''} {differences(missing, left, wrong)} Give the model that it was saved from, or "
        "another checkpoint"
    )


def differences(missing: Sequence[str], left: Sequence[str], wrong: Sequence[str]) -> str:
    """Describes the differing tensors of a checkpoint and a model: number and first names of each kind.

    Args:
        left: tensors missing in the model.
        wrong: tensors of another shape, with both shapes.
    """
    kinds = ((missing, "is", "missing"), (left, "is", "not in the model"), (wrong, "has", "another shape"))
    out = []
    for names, verb, what in kinds:
        if names:
            several = {"is": "are", "has": "have"}[verb]
            count = f"{len(names)} tensors {several}" if len(names) > 1 else f"1 tensor {verb}"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            out.append(f"{count} {what}: {'; '.join(names[:_SHOWN])}{more}.")
    return " ".join(out)


def shape_differences(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str:
    """Describes the differences of a checkpoint's shapes, by name, from a model's; empty if there is none."""
    missing = [name for name in expected if name not in found]
    left = [name for name in found if name not in expected]
    both = ((name, tuple(found[name]), tuple(expected[name])) for name in expected if name in found)
    return differences(missing, left, [unlike(*each) for each in both if each[1] != each[2]])


def unlike(name: str, there: Sequence[int], here: Sequence[int]) -> str:
    """Describes a tensor with another shape in a checkpoint than in the model."""
    return f"{name} with {tuple(there)} there, {tuple(here)} in the model"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    if len(names) == 1:
        return f"{shown} was"
    return f"{shown}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''} were"
