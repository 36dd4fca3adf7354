"""Saves checkpoints in a background thread, in pieces, to storage shared by all ranks."""

import gc
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.device import one_thread
from ...models.layouts.dcp import Piece, boxes, save_planner
from ...models.layouts.lazy import Box
from .folder import REPLACES, CheckpointFolder, described
from .state import Frozen, Located, State

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A box of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Offset of the box in the tensor."""
    data: "torch.Tensor"

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """Key of this box among all ranks."""
        return self.name, self.offset

    @property
    def piece(self) -> Piece:
        """Converts to the argument of `save_planner`."""
        return Piece(self.name, self.shape, self.offset, self.data.shape, self.data.dtype, lambda: self.data)


def parts_of(tensors: Located) -> list[SavedPart]:
    """Parts of tensors on this rank, each of at most `PIECE_BYTES`: torch reads a part as a whole, and a resumed
    training may need little of it.
    """
    return [
        SavedPart(name, tuple(region.shape), _moved(box.offset, piece), data[piece])
        for name, (tensor, region) in tensors.items()
        for box, data in region.parts(tensor)
        for piece in boxes(data)
    ]


def _moved(offset: tuple[int, ...], piece: Box) -> tuple[int, ...]:
    return tuple(begin + each.start for begin, each in zip(offset, piece))


def write(folder: Path, parts: Sequence[SavedPart], group: "ProcessGroup | None") -> None:
    """Writes the parts of all ranks, each part once. All ranks call it with their own parts.

    Args:
        folder: a new folder.
        parts: parts of this rank, on the CPU.
        group: group of all ranks; None for one.

    Raises:
        CheckpointException: on every rank, if one of them could not write.
    """
    from torch.distributed import checkpoint

    planner = save_planner([each.piece for each in parts])
    checkpoint.save({}, storage_writer=_writer(folder), planner=planner, process_group=group, no_dist=group is None)


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        """Reports a disk that fails in the middle of a tensor, for which torch reports an unexpected position."""

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

    # Parts are on the CPU. To copy ahead, torch would open a context on GPU 0 from every rank.
    return Writer(folder, per_thread_copy_ahead=0)


PATIENCE = timedelta(days=1)
"""Timeout of collectives during a checkpoint; gloo's default of half an hour is short for terabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Result of a save."""

    step: int
    seconds: float
    """Time from the call to the end, s."""
    stalled: float
    """Time for which the training was blocked, s."""
    failure: str = ""
    """Reason of the failure; empty if it succeeded."""
    bytes: int = 0
    """Size of all its files; 0 if it failed."""


class Saver:
    """Saves the state of a training, one checkpoint at a time. All ranks make one and call the same methods.

    Replicated tensors are written by one rank, and each rank writes about as much as the others. A save that fails,
    for example because the disk is full, is reported and leaves nothing; the training continues.

    Args:
        folder: folder of the checkpoints, on a file system that all ranks share.
        rank: rank of this process.
        group: gloo group of all ranks that is used by nothing else meanwhile; None for one rank.
    """

    def __init__(self, folder: CheckpointFolder, rank: int = 0, group: "ProcessGroup | None" = None) -> None:
        self.folder = folder
        self._rank, self._group = rank, group
        self._assigned: set[Any] | None = None
        """Keys of the parts that this rank writes."""
        self._known: set[Any] = set()
        """Keys of all parts of this rank when the parts were last assigned."""
        self._buffers: dict[Any, torch.Tensor] = {}
        self._thread = one_thread("checkpoint")
        self._pending: Future[Saved] | None = None
        self._kept = False
        """True if the frozen tensors are saved."""

    def rehearse(self, state: State, step: int) -> Saved:
        """Saves a checkpoint like `save`, reads it back, removes it, and returns the result. No save may be running."""
        assert self._pending is None, "a running save is waited for first"
        self._start(state, step, None)
        saved = self.wait()
        assert saved is not None, "the save was just started"
        return saved

    def save(self, state: State | Frozen, step: int, facts: Mapping[str, Any]) -> Saved | None:
        """Copies the state and starts saving it. Waits for the previous save, and returns its result.

        Args:
            facts: description for the manifest.
        """
        before = self.wait()
        self._start(state, step, dict(facts))
        return before

    def _start(self, state: State | Frozen, step: int, facts: dict[str, Any] | None) -> None:
        """Copies the state and starts saving it. Without facts the checkpoint is removed again."""
        begin = time.perf_counter()
        if failure := self._keep(state):
            self._pending = self._thread.submit(Saved, step=step, seconds=0.0, stalled=0.0, failure=failure)
            return
        parts = parts_of(state.tensors())
        self._share_out(parts)
        copies = self._copied([each for each in parts if self._assigned is None or each.place in self._assigned])
        stalled = time.perf_counter() - begin
        self._pending = self._thread.submit(self._save, copies, step, facts, begin, stalled)

    def wait(self) -> Saved | None:
        """Waits for the running save and returns its result; None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def close(self) -> None:
        """Ends the thread after its current save, and frees the memory of copies."""
        self._thread.shutdown()
        self._give_back()

    def keep_again(self, state: State, replaced: Sequence[str]) -> str:
        """Replaces a damaged copy of the frozen tensors. Returns the reason of a failure, or an empty text.

        Args:
            replaced: seals of the damaged copy, which checkpoints refer to.
        """
        return self._keep(state, {REPLACES: list(replaced)})

    def _give_back(self) -> None:
        """Returns pinned memory to the system: torch would keep it for later pinned tensors."""
        import torch

        pinned = bool(self._buffers)
        self._buffers.clear()
        if pinned and hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
            gc.collect()  # planners of earlier saves, which hold the copies, are in reference cycles
            torch.accelerator.empty_host_cache()

    def _keep(self, state: State | Frozen, facts: Mapping[str, Any] | None = None) -> str:
        """Saves the frozen tensors if necessary. Returns the reason of a failure, the same on every rank."""
        frozen = state.frozen
        if frozen is None or self._kept:
            return ""
        self._kept = bool(self.gathered(bool(self.folder.frozen.all()))[0])
        if self._kept:
            return ""
        if self._rank == 0:
            self.folder.frozen.path.mkdir(parents=True, exist_ok=True)
        self.gathered(None)
        once = Saver(self.folder.frozen, self._rank, self._group)
        once.save(frozen, 0, facts or {})
        saved = once.wait()
        once.close()
        assert saved is not None, "the checkpoint was just saved"
        self._kept = not saved.failure
        return saved.failure

    def _share_out(self, parts: Sequence[SavedPart]) -> None:
        """Assigns the parts to ranks, again whenever a rank has new parts."""
        if self._group is None:
            return
        import torch
        import torch.distributed as dist

        places = {each.place for each in parts}
        new = torch.tensor(int(self._assigned is None or places != self._known))
        dist.all_reduce(new, op=dist.ReduceOp.MAX, group=self._group)
        if not new:
            return
        sizes = {each.place: each.data.numel() * each.data.element_size() for each in parts}
        self._known, self._assigned = places, shared_out(self.gathered(sizes))[self._rank]
        self._give_back()

    def _copied(self, parts: Sequence[SavedPart]) -> list[SavedPart]:
        """Copies on the CPU, which do not change during training."""
        import torch

        out = []
        for each in parts:
            if each.data.device.type == "cpu":
                out.append(replace(each, data=each.data.clone()))
                continue
            # Allocating pinned memory is slow, so it is kept for the next save.
            if each.place not in self._buffers:
                self._buffers[each.place] = torch.empty_like(each.data, device="cpu", pin_memory=True)
            buffer = self._buffers[each.place].copy_(each.data, non_blocking=True)
            out.append(replace(each, data=buffer))
        if self._buffers:
            torch.cuda.synchronize()
        return out

    def _save(
        self, parts: list[SavedPart], step: int, facts: dict[str, Any] | None, begin: float, stalled: float
    ) -> Saved:
        from torch.distributed.checkpoint import CheckpointException

        size = 0
        try:
            failure, size = self._written(parts, step, facts)
        except (CheckpointException, OSError) as error:
            failure = _reason(error, self._group is not None)
        if (failure or facts is None) and self._rank == 0:
            self.folder.discard(step)
        return Saved(step=step, seconds=time.perf_counter() - begin, stalled=stalled, failure=failure, bytes=size)

    def _written(self, parts: list[SavedPart], step: int, facts: dict[str, Any] | None) -> tuple[str, int]:
        """Writes a checkpoint. Returns the reason of a failure, the same on every rank, and the number of bytes."""
        beside = self.folder.temporary(step)
        write(beside, parts, self._group)
        own = [f"__{self._rank}_*.distcp", *([".metadata"] if self._rank == 0 else [])]
        own_files = _or_reason(lambda: described(beside, [each.name for name in own for each in beside.glob(name)]))
        all_ranks = self.gathered(own_files)
        failure = next((each for each in all_ranks if isinstance(each, str)), "")
        if not failure and self._rank == 0:
            files = {name: about for each in all_ranks for name, about in each.items()}
            missing = [name for name in files if not (beside / name).exists()]
            if missing:
                failure = f"rank 0 does not see {missing[0]}: all ranks must share the folder {self.folder.path}"
            elif facts is not None:
                result = _or_reason(lambda: self.folder.finish(step, files, facts))
                failure = result if isinstance(result, str) else ""
        size = sum(about["bytes"] for each in all_ranks if isinstance(each, dict) for about in each.values())
        return str(self.gathered(failure)[0]), size

    def gathered(self, value: Any) -> list[Any]:
        """Gathers a value of each rank."""
        return gathered(value, self._group)


def gathered(value: Any, group: "ProcessGroup | None") -> list[Any]:
    """Gathers a value of each rank of a group; None for one rank."""
    if group is None:
        return [value]
    import torch.distributed as dist

    out = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def patient_group() -> "ProcessGroup":
    """Returns a group of all ranks whose collectives wait while another rank reads or writes a large checkpoint. All
    ranks call it. A dead rank is detected by its connection rather than by a timeout.
    """
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=PATIENCE)


def shared_out(all_ranks: Sequence[Mapping[Any, int]]) -> list[set[Any]]:
    """Assigns each part to one of the ranks that have it: the largest parts first, each to the rank with the least
    assigned bytes.

    Args:
        all_ranks: size of each part of every rank.
    """
    holders: dict[Any, list[int]] = {}
    for rank, sizes in enumerate(all_ranks):
        for place in sizes:
            holders.setdefault(place, []).append(rank)
    loads = [0] * len(all_ranks)
    out: list[set[Any]] = [set() for _ in all_ranks]
    for place, ranks in sorted(holders.items(), key=lambda item: (-all_ranks[item[1][0]][item[0]], str(item[0]))):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += all_ranks[rank][place] + 1
        out[rank].add(place)
    return out


def _or_reason(what: Any) -> Any:
    """Calls `what`; returns its result, or the reason as text if the disk fails."""
    try:
        return what()
    except OSError as error:
        return _reason(error)


def _reason(error: BaseException, several: bool = True) -> str:
    """Reason of a failed save, in a line: the error of the failing rank rather than the report that a rank failed,
    with the rank's number if there are several.
    """
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"rank {rank}: {_reason(cause)}" if several else _reason(cause)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
