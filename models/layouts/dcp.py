"""Folders of torch.distributed.checkpoint: read partially, and written piece by piece, by one process."""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ..architecture import one_line
from .weights import Box, LazyTensor, box_shape

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are written as one piece, and so are in memory at once when a part of it is read."""
_HARMLESS = {
    ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset"), ("torch", "Size"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip
_DCP_MODULES = tuple(f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem", "planner"))


def dcp_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Returns the tensors in a DCP folder by their stored names. Other objects are left out.

    Raises:
        WorkloadError: it is not such a folder, or its metadata cannot be read, or would run code.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_metadata(folder)
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for path, end in ((folder / name, end) for name, end in ends.items()):
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            raise WorkloadError(
                f"'{path}' is damaged: it has {size} bytes, and had {end} or more when saved; copy the checkpoint again, or "
                "remove its folder to use an earlier one"
            )
    return {
        name: LazyTensor(partial(_read, folder, metadata, name), entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_metadata(folder: Path) -> "Metadata":
    """Reads the metadata of a DCP folder without running code that a pickle may contain.

    Raises:
        WorkloadError: as for `dcp_tensors`.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA
    if not path.is_file():
        raise WorkloadError(f"'{folder}' is not a distributed checkpoint: it has no {METADATA}")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, LookupError, OSError) as error:
        raise WorkloadError(f"'{path}' cannot be read: {one_line(error)}; copy the checkpoint again") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise WorkloadError(f"'{path}' contains no metadata of torch.distributed.checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module in _DCP_MODULES and "." not in name) or (module, name) in _HARMLESS:
            cls = super().find_class(module, name)
            if module not in _DCP_MODULES or (isinstance(cls, type) and cls.__module__ == module):
                return cls
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of tensors needs")


def _read(folder: Path, metadata: "Metadata", name: str, box: Box) -> "torch.Tensor":
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class SingleTensorPlanner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            extents = zip(read_item.dest_offsets, read_item.lengths)
            return tensor[tuple(slice(offset, offset + length) for offset, length in extents)]

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            pass

    entry: Any = metadata.state_dict_metadata[name]
    tensor = torch.empty(box_shape(box), dtype=entry.properties.dtype)
    if not tensor.numel():
        return tensor
    requested = ChunkStorageMetadata(offsets=torch.Size([extent.start for extent in box]), sizes=tensor.shape)
    items = create_read_items_for_chunk_list(name, entry, [requested])
    if sum(math.prod(item.lengths) for item in items) != tensor.numel():
        raise WorkloadError(f"'{folder}' does not contain all of {name}: a rank's part was not saved")
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        reader.read_data(LoadPlan(items), SingleTensorPlanner()).wait()
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError, ValueError) as error:
        raise WorkloadError(
            f"'{folder}': {name} cannot be read: {one_line(error)}; copy the checkpoint again"
        ) from error
    return tensor


def save_planner(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns a planner with which torch.distributed.checkpoint writes parts of tensors, each in pieces (`boxes`).

    The state dict has a part for each pair of a tensor's name and the part's offset in the tensor.

    Args:
        shapes: shape of each whole tensor.
    """
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.pieces: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
            items = []
            for (name, offset), part in self.state_dict.items():
                for box in boxes(part):
                    piece = part[box]
                    begin = tuple(start + cut.start for start, cut in zip(offset, box))
                    chunk = ChunkStorageMetadata(torch.Size(begin), piece.shape)
                    tensor_data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(shapes[name]))
                    items.append(
                        WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=tensor_data)
                    )
                    self.pieces[name, begin] = piece
            self.plan = SavePlan(items)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.index.offset is not None, "pieces have offsets"
            return self.pieces[write_item.index.fqn, tuple(write_item.index.offset)]

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def boxes(tensor: "LazyTensor | torch.Tensor") -> Iterable[Box]:
    """Boxes that partition a tensor, each at most `PIECE_BYTES` or one entry of the first two dimensions."""
    boxes_so_far: list[Box] = [()]
    nbytes = tensor.nbytes
    for size in tensor.shape[:2]:
        if nbytes <= PIECE_BYTES or size == 0:
            break
        step = max(1, PIECE_BYTES * size // nbytes)
        boxes_so_far = [
            (*box, slice(start, min(size, start + step))) for box in boxes_so_far for start in range(0, size, step)
        ]
        nbytes = nbytes // size * step
    full = [slice(0, size) for size in tensor.shape]
    return [(*box, *full[len(box) :]) for box in boxes_so_far]
