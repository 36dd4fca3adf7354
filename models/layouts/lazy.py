"""Tensors that are read box by box: transformations of stored tensors without reading them.

A box is a tuple of slices with step 1, one per dimension; missing ones take everything. Every operation maps a box of
its result to boxes of its inputs, so that a rank reads only its share of a matrix that is assembled from others.
transformers' own conversions run on these tensors as on torch's (`__torch_function__`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]


def full_box(box: Box | None, shape: Sequence[int]) -> Box:
    """Completes a box to a slice from 0 or more to at most the size, for every dimension.

    Raises:
        ValueError: it has more dimensions than the tensor, or a step.
    """
    slices = box or ()
    if len(slices) > len(shape) or any(extent.step not in (None, 1) for extent in slices):
        raise ValueError(f"a box of a tensor of shape {tuple(shape)} is a slice a dimension, without steps: {box}")
    remaining = (slice(None),) * (len(shape) - len(slices))
    return tuple(slice(*extent.indices(size)[:2]) for extent, size in zip((*slices, *remaining), shape))


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of a full box."""
    return tuple(max(0, extent.stop - extent.start) for extent in box)


class LazyTensor(ABC):
    """A tensor whose boxes can be read."""

    fresh = True
    """True if `_read` returns memory that nothing else uses."""

    def __init__(self, shape: Sequence[int], dtype: "torch.dtype") -> None:
        import torch

        self.shape = torch.Size(shape)
        self.dtype = dtype

    @abstractmethod
    def _read(self, box: Box) -> "torch.Tensor":
        """Returns the tensor of a full box; its memory may be shared if it is not `fresh`."""

    def read(self, box: Box | None = None) -> "torch.Tensor":
        """Returns a box as a new contiguous CPU tensor.

        Raises:
            ValueError: it is not a box of this tensor.
        """
        import torch

        tensor = self._read(full_box(box, self.shape))
        compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if self.fresh and compact else tensor.clone(memory_format=torch.contiguous_format)

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


class Stored(LazyTensor):
    """A tensor of a reader.

    Args:
        read: returns the tensor of a full box.
        fresh: True if `read` returns memory that nothing else uses; otherwise it is copied.
    """

    def __init__(
        self,
        read: Callable[[Box], "torch.Tensor"],
        shape: Sequence[int],
        dtype: "torch.dtype",
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__(shape, dtype)
        self._reader, self.fresh = read, fresh

    def _read(self, box: Box) -> "torch.Tensor":
        return self._reader(box)


class _Joined(LazyTensor):
    """Tensors concatenated along a dimension."""

    def __init__(self, tensors: Sequence[LazyTensor], dim: int) -> None:
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        super().__init__(shape, tensors[0].dtype)
        self.tensors, self.dim = tensors, dim

    def _read(self, box: Box) -> "torch.Tensor":
        import torch

        joined, offset = torch.empty(box_shape(box), dtype=self.dtype), 0
        requested = box[self.dim]
        for tensor in self.tensors:
            start, stop = max(requested.start, offset), min(requested.stop, offset + tensor.shape[self.dim])
            if start < stop:
                inner = (*box[: self.dim], slice(start - offset, stop - offset), *box[self.dim + 1 :])
                joined.narrow(self.dim, start - requested.start, stop - start).copy_(tensor._read(inner))
            offset += tensor.shape[self.dim]
        return joined


class _Mapped(LazyTensor):
    """A tensor whose dimensions are those of another in another order or form: maps boxes there, and results back."""

    def __init__(
        self,
        base: LazyTensor,
        shape: Sequence[int],
        to_base: Callable[[Box], Box],
        from_base: Callable[["torch.Tensor"], "torch.Tensor"],
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(shape, dtype or base.dtype)
        self.base, self.to_base, self.from_base = base, to_base, from_base
        self.fresh = base.fresh

    def _read(self, box: Box) -> "torch.Tensor":
        return self.from_base(self.base._read(self.to_base(box)))


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Concatenates tensors.

    Raises:
        ValueError: they differ in another dimension or in dtype.
    """
    dim %= tensors[0].ndim
    kinds = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :], tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        raise ValueError(
            f"tensors of shapes {[tuple(tensor.shape) for tensor in tensors]} cannot be joined along {dim}"
        )
    return tensors[0] if len(tensors) == 1 else _Joined(tensors, dim)


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Stacks tensors of one shape along a new dimension."""
    dim %= tensors[0].ndim + 1
    return cat([unsqueeze(tensor, dim) for tensor in tensors], dim)


def unsqueeze(base: LazyTensor, dim: int) -> LazyTensor:
    shape = (*base.shape[:dim], 1, *base.shape[dim:])
    return _Mapped(base, shape, lambda box: (*box[:dim], *box[dim + 1 :]), lambda tensor: tensor.unsqueeze(dim))


def select(base: LazyTensor, dim: int, index: int) -> LazyTensor:
    """Selects one entry of a dimension, which is removed."""
    dim %= base.ndim
    shape = (*base.shape[:dim], *base.shape[dim + 1 :])
    entry = slice(index, index + 1)
    return _Mapped(base, shape, lambda box: (*box[:dim], entry, *box[dim:]), lambda tensor: tensor.squeeze(dim))


def narrow(base: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    """Selects consecutive entries of a dimension."""
    shape = (*base.shape[:dim], length, *base.shape[dim + 1 :])

    def to_base(box: Box) -> Box:
        return (*box[:dim], slice(box[dim].start + start, box[dim].stop + start), *box[dim + 1 :])

    return _Mapped(base, shape, to_base, lambda tensor: tensor)


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
    starts = [sum(sizes[:end]) for end in range(len(sizes))]
    return tuple(narrow(base, dim, start, size) for start, size in zip(starts, sizes))


def transpose(base: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def transposed(values: Sequence[Any]) -> tuple[Any, ...]:
        swapped = list(values)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return tuple(swapped)

    return _Mapped(base, transposed(base.shape), transposed, lambda tensor: tensor.transpose(dim0, dim1))


def cast(base: LazyTensor, dtype: "torch.dtype") -> LazyTensor:
    return (
        base
        if dtype == base.dtype
        else _Mapped(base, base.shape, lambda box: box, lambda tensor: tensor.to(dtype), dtype)
    )


class Merged(LazyTensor):
    """A matrix plus a low-rank one, `W + scale * B A`, computed in float32 and rounded to the matrix's dtype.

    Args:
        base: W, of shape (out, in), or (in, out) if `transposed`.
        up: B, of shape (out, rank).
        down: A, of shape (rank, in).
    """

    def __init__(self, base: LazyTensor, *, up: LazyTensor, down: LazyTensor, scale: float, transposed: bool) -> None:
        super().__init__(base.shape, base.dtype)
        self.base, self.up, self.down, self.scale, self.transposed = base, up, down, scale, transposed

    def _read(self, box: Box) -> "torch.Tensor":
        import torch

        rows, columns = reversed(box) if self.transposed else box
        up = self.up._read((rows, slice(0, self.up.shape[1]))).to(torch.float32)
        down = self.down._read((slice(0, self.down.shape[0]), columns)).to(torch.float32)
        product = (up @ down) * self.scale
        weight = self.base._read(box)
        return (weight.to(torch.float32) + (product.T if self.transposed else product)).to(self.dtype)


LazyTensors = Mapping[str, LazyTensor]
