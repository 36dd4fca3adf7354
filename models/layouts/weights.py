"""Tensors that are read box by box: transformations of stored tensors without reading them; and the named ones of a model.

A box is a tuple of slices with step 1, one per dimension; missing ones take everything. Every operation maps a box of
its result to boxes of its inputs, so that a rank reads only its share of a matrix that is assembled from others.
transformers' own conversions run on these tensors as on torch's (`__torch_function__`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...base._transformers import may_be_left, may_be_missing, tied
from ...base.errors import WorkloadError

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of a full box."""
    return tuple(max(0, extent.stop - extent.start) for extent in box)


class LazyTensor:
    """A tensor whose boxes can be read.

    Args:
        read: returns the tensor of a box with a start and an end for every dimension.
    """

    def __init__(self, read: "Callable[[Box], torch.Tensor]", shape: Sequence[int], dtype: "torch.dtype") -> None:
        import torch

        self.read_box, self.shape, self.dtype = read, torch.Size(shape), dtype

    def read(self, box: Box | None = None) -> "torch.Tensor":
        """Returns a box as a contiguous tensor without further memory behind it.

        Raises:
            ValueError: the box has more dimensions than the tensor.
        """
        import torch

        box = box or ()
        extents = (*box, *[slice(None)] * (self.ndim - len(box)))
        tensor = self.read_box(
            tuple(slice(*extent.indices(size)[:2]) for extent, size in zip(extents, self.shape, strict=True))
        )
        compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if compact else tensor.clone(memory_format=torch.contiguous_format)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # -- interface of torch's tensors --------------------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "LazyTensor":
        return self

    def squeeze(self, dim: int) -> "LazyTensor":
        return select(self, dim % self.ndim, 0) if self.shape[dim] == 1 else self

    def transpose(self, dim0: int, dim1: int) -> "LazyTensor":
        return transpose(self, dim0, dim1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        functions: dict[Any, Callable[..., Any]] = {
            torch.stack: stack, torch.cat: cat, torch.chunk: chunk, torch.split: split, torch.transpose: transpose,
        }  # fmt: skip
        return functions[function](*args, **(kwargs or {})) if function in functions else NotImplemented


LazyTensors = Mapping[str, LazyTensor]


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Concatenates tensors.

    Raises:
        ValueError: they differ in another dimension or in dtype.
    """
    dim %= tensors[0].ndim
    shapes, dtype = [tensor.shape for tensor in tensors], tensors[0].dtype
    if len({(*tensor.shape[:dim], *tensor.shape[dim + 1 :], tensor.dtype) for tensor in tensors}) != 1:
        raise ValueError(f"tensors of shapes {[tuple(shape) for shape in shapes]} cannot be joined along {dim}")
    ends = list(accumulate(shape[dim] for shape in shapes))

    def read(box: Box) -> "torch.Tensor":
        import torch

        joined, requested = torch.empty(box_shape(box), dtype=dtype), box[dim]
        for tensor, end in zip(tensors, ends):
            offset = end - tensor.shape[dim]
            start, stop = max(requested.start, offset), min(requested.stop, end)
            if start < stop:
                part = tensor.read_box((*box[:dim], slice(start - offset, stop - offset), *box[dim + 1 :]))
                joined.narrow(dim, start - requested.start, stop - start).copy_(part)
        return joined

    return LazyTensor(read, (*shapes[0][:dim], ends[-1], *shapes[0][dim + 1 :]), dtype)


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Stacks tensors of one shape along a new dimension."""
    dim %= tensors[0].ndim + 1
    return cat([unsqueeze(tensor, dim) for tensor in tensors], dim)


def unsqueeze(base: LazyTensor, dim: int) -> LazyTensor:
    shape = (*base.shape[:dim], 1, *base.shape[dim:])
    return LazyTensor(lambda box: base.read_box((*box[:dim], *box[dim + 1 :])).unsqueeze(dim), shape, base.dtype)


def select(base: LazyTensor, dim: int, index: int) -> LazyTensor:
    """Selects one entry of a dimension, which is removed."""
    dim %= base.ndim
    entry, shape = slice(index, index + 1), (*base.shape[:dim], *base.shape[dim + 1 :])
    return LazyTensor(lambda box: base.read_box((*box[:dim], entry, *box[dim:])).squeeze(dim), shape, base.dtype)


def narrow(base: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    """Selects consecutive entries of a dimension."""

    def read(box: Box) -> "torch.Tensor":
        return base.read_box((*box[:dim], slice(box[dim].start + start, box[dim].stop + start), *box[dim + 1 :]))

    return LazyTensor(read, (*base.shape[:dim], length, *base.shape[dim + 1 :]), base.dtype)


def chunk(base: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    """Like `torch.chunk`."""
    return split(base, -(-base.shape[dim] // chunks), dim)


def split(base: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    """Like `torch.split`."""
    dim %= base.ndim
    total = base.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if sum(sizes) != total:
        raise ValueError(f"{total} entries cannot be split into {list(sizes)}")
    return tuple(narrow(base, dim, end - size, size) for size, end in zip(sizes, accumulate(sizes)))


def transpose(base: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def transposed(values: Sequence[Any]) -> tuple[Any, ...]:
        swapped = list(values)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return tuple(swapped)

    return LazyTensor(
        lambda box: base.read_box(transposed(box)).transpose(dim0, dim1), transposed(base.shape), base.dtype
    )


def cast(base: LazyTensor, dtype: "torch.dtype") -> LazyTensor:
    return LazyTensor(lambda box: base.read_box(box).to(dtype), base.shape, dtype)


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


def fit(candidates: LazyTensors, model: Any, location: str, *, unexpected: Iterable[str] = ()) -> Weights:
    """Returns the weights of a model from tensors by its names.

    Args:
        candidates: tensors by the model's names.
        model: a transformers model, which may be on the meta device.
        location: of the tensors, for messages.
        unexpected: names of tensors that the model does not have.

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
            f" {differences} Give the model that it was saved from, or another checkpoint"
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
