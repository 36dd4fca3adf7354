"""Parts of tensors, written by `torch.distributed.checkpoint`: of what a rank writes any other can read a part."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.layouts.dcp import Piece, boxes, save_planner
from ...models.layouts.lazy import Box
from .state import Located

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor."""

    name: str
    """The tensor's."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box begins in it."""
    data: "torch.Tensor"
    """What is there."""

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """By which it is known among all parts of all ranks."""
        return self.name, self.offset

    @property
    def piece(self) -> Piece:
        """It as `save_planner` takes it."""
        return Piece(self.name, self.shape, self.offset, self.data.shape, self.data.dtype, lambda: self.data)


def parts_of(tensors: Located) -> list[Part]:
    """The parts that this rank has of tensors, each of at most `PIECE_BYTES`: of a part, which torch reads as a whole, whoever
    goes on from it may need little."""
    return [
        Part(name, tuple(region.shape), _moved(box.offset, piece), data[piece])
        for name, (tensor, region) in tensors.items()
        for box, data in region.parts(tensor)
        for piece in boxes(data)
    ]


def _moved(offset: tuple[int, ...], piece: Box) -> tuple[int, ...]:
    return tuple(begin + each.start for begin, each in zip(offset, piece))


def write(folder: Path, parts: Sequence[Part], group: "ProcessGroup | None") -> None:
    """Writes the parts of all ranks, each of which all call it with its own, no part twice.

    Args:
        folder: a new one.
        parts: of this rank, on the CPU.
        group: of all ranks; None for one.

    Raises:
        CheckpointException: on every rank, where one of them could not write.
    """
    from torch.distributed import checkpoint

    planner = save_planner([each.piece for each in parts])
    checkpoint.save({}, storage_writer=_writer(folder), planner=planner, process_group=group, no_dist=group is None)


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        """Tells of a disk that refuses in the middle of a tensor, where torch tells of a position it did not expect."""

        def write_data(self, *args: Any) -> Any:
            try:
                return super().write_data(*args)
            except RuntimeError as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__context__
                if cause is None:
                    raise
                raise OSError(cause.errno, cause.strerror) from error

    # What is written is on the CPU. To copy ahead torch would open a context on GPU 0, from every rank.
    return Writer(folder, per_thread_copy_ahead=0)
