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
    given = box or ()
    if len(given) > len(shape) or any(each.step not in (None, 1) for each in given):
        raise ValueError(f"a box of a tensor of shape {tuple(shape)} is a slice a dimension, without steps: {box}")
    rest = (slice(None),) * (len(shape) - len(given))
    return tuple(slice(*each.indices(size)[:2]) for each, size in zip((*given, *rest), shape))


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of a full box."""
    return tuple(max(0, each.stop - each.start) for each in box)


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

        found = self._read(full_box(box, self.shape))
        whole = found.is_contiguous() and found.untyped_storage().nbytes() == found.nbytes
        return found if self.fresh and whole else found.clone(memory_format=torch.contiguous_format)

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

        known: dict[Any, Callable[..., Any]] = {
            torch.stack: stack, torch.cat: cat, torch.chunk: chunk, torch.split: split, torch.transpose: transpose,
        }  # fmt: skip
        return known[function](*args, **(kwargs or {})) if function in known else NotImplemented


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
    """Parts concatenated along a dimension."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(each.shape[dim] for each in parts)
        super().__init__(shape, parts[0].dtype)
        self.parts, self.dim = parts, dim

    def _read(self, box: Box) -> "torch.Tensor":
        import torch

        out, at = torch.empty(box_shape(box), dtype=self.dtype), 0
        rows_wanted = box[self.dim]
        for part in self.parts:
            first, last = max(rows_wanted.start, at), min(rows_wanted.stop, at + part.shape[self.dim])
            if first < last:
                inner = (*box[: self.dim], slice(first - at, last - at), *box[self.dim + 1 :])
                out.narrow(self.dim, first - rows_wanted.start, last - first).copy_(part._read(inner))
            at += part.shape[self.dim]
        return out


class _Mapped(LazyTensor):
    """A tensor whose dimensions are those of another in another order or form: maps boxes there, and results back."""

    def __init__(
        self,
        of: LazyTensor,
        shape: Sequence[int],
        there: Callable[[Box], Box],
        back: Callable[["torch.Tensor"], "torch.Tensor"],
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(shape, dtype or of.dtype)
        self.of, self.there, self.back = of, there, back
        self.fresh = of.fresh

    def _read(self, box: Box) -> "torch.Tensor":
        return self.back(self.of._read(self.there(box)))


def cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Concatenates parts.

    Raises:
        ValueError: they differ in another dimension or in dtype.
    """
    dim %= parts[0].ndim
    rest = {(*each.shape[:dim], *each.shape[dim + 1 :], each.dtype) for each in parts}
    if len(rest) != 1:
        raise ValueError(f"tensors of shapes {[tuple(each.shape) for each in parts]} cannot be joined along {dim}")
    return parts[0] if len(parts) == 1 else _Joined(parts, dim)


def stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Stacks parts of one shape along a new dimension."""
    dim %= parts[0].ndim + 1
    return cat([unsqueeze(each, dim) for each in parts], dim)


def unsqueeze(of: LazyTensor, dim: int) -> LazyTensor:
    shape = (*of.shape[:dim], 1, *of.shape[dim:])
    return _Mapped(of, shape, lambda box: (*box[:dim], *box[dim + 1 :]), lambda found: found.unsqueeze(dim))


def select(of: LazyTensor, dim: int, at: int) -> LazyTensor:
    """Selects one entry of a dimension, which is removed."""
    dim %= of.ndim
    shape = (*of.shape[:dim], *of.shape[dim + 1 :])
    there = slice(at, at + 1)
    return _Mapped(of, shape, lambda box: (*box[:dim], there, *box[dim:]), lambda found: found.squeeze(dim))


def narrow(of: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    """Selects consecutive entries of a dimension."""
    shape = (*of.shape[:dim], length, *of.shape[dim + 1 :])

    def there(box: Box) -> Box:
        return (*box[:dim], slice(box[dim].start + start, box[dim].stop + start), *box[dim + 1 :])

    return _Mapped(of, shape, there, lambda found: found)


def chunk(of: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    """Like `torch.chunk`."""
    return split(of, -(-of.shape[dim] // chunks), dim)


def split(of: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    """Like `torch.split`."""
    dim %= of.ndim
    total = of.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    if sum(sizes) != total:
        raise ValueError(f"{total} entries cannot be split into {list(sizes)}")
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return tuple(narrow(of, dim, start, size) for start, size in zip(starts, sizes))


def transpose(of: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def transposed(values: Sequence[Any]) -> tuple[Any, ...]:
        out = list(values)
        out[dim0], out[dim1] = out[dim1], out[dim0]
        return tuple(out)

    return _Mapped(of, transposed(of.shape), transposed, lambda found: found.transpose(dim0, dim1))


def cast(of: LazyTensor, dtype: "torch.dtype") -> LazyTensor:
    return of if dtype == of.dtype else _Mapped(of, of.shape, lambda box: box, lambda found: found.to(dtype), dtype)


class Merged(LazyTensor):
    """A matrix plus a low-rank one, `W + scale * B A`, computed in float32 and rounded to the matrix's dtype.

    Args:
        of: W, of shape (out, in), or (in, out) if `transposed`.
        up: B, of shape (out, rank).
        down: A, of shape (rank, in).
    """

    def __init__(self, of: LazyTensor, *, up: LazyTensor, down: LazyTensor, scale: float, transposed: bool) -> None:
        super().__init__(of.shape, of.dtype)
        self.of, self.up, self.down, self.scale, self.transposed = of, up, down, scale, transposed

    def _read(self, box: Box) -> "torch.Tensor":
        import torch

        out, inner = reversed(box) if self.transposed else box
        up = self.up._read((out, slice(0, self.up.shape[1]))).to(torch.float32)
        down = self.down._read((slice(0, self.down.shape[0]), inner)).to(torch.float32)
        more = (up @ down) * self.scale
        base = self.of._read(box)
        return (base.to(torch.float32) + (more.T if self.transposed else more)).to(self.dtype)


LazyTensors = Mapping[str, LazyTensor]
