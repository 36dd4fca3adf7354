"""Saves checkpoints in a background thread, in pieces, to storage that several ranks share."""

import gc
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.layouts.dcp import Piece, boxes, save_planner
from ...models.layouts.lazy import Box
from .folder import REPLACES, CheckpointFolder, described
from .state import Frozen, Located, State

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


PATIENCE = timedelta(days=1)
"""How long ranks wait for one that is at a checkpoint; gloo's usual half an hour is little for terabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """How a save ended."""

    step: int
    """Whose checkpoint it is."""
    seconds: float
    """From the call to the end, s."""
    stalled: float
    """For how long of that the training stood still, s."""
    failure: str = ""
    """Why there is no such checkpoint; empty where there is one."""
    bytes: int = 0
    """Of all its files; 0 where there is none."""


class Saver:
    """Saves the state of a training, one checkpoint at a time. All ranks make one and call its methods alike.

    What several ranks hold alike one of them writes, each about as much as the others. A save that fails, as on a disk that
    is full, is told of and leaves nothing; the training goes on.

    Args:
        folder: where they go, on a file system that all ranks share.
        rank: of this process.
        group: of all ranks, of the gloo backend and used by nothing else meanwhile; None for one rank.
    """

    def __init__(self, folder: CheckpointFolder, rank: int = 0, group: "ProcessGroup | None" = None) -> None:
        self.folder = folder
        self._rank, self._group = rank, group
        self._mine: set[Any] | None = None
        """The places of what this rank writes."""
        self._known: set[Any] = set()
        """The places of all that this rank has, by which that was shared out."""
        self._buffers: dict[Any, torch.Tensor] = {}
        # A thread begins on device 0, where whatever asks CUDA for anything would open a context from every rank.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_on_device, initargs=(_current_device(),)
        )
        self._pending: Future[Saved] | None = None
        self._kept = False
        """Whether what no step changes is kept."""

    def rehearse(self, state: State, step: int) -> Saved:
        """Saves a checkpoint as `save` does, reads it back, removes it again, and tells how that went. No save is under way.

        Args:
            state: of the training as it is now.
            step: optimizer steps that are done.
        """
        assert self._pending is None, "one that is under way is waited for first"
        self._start(state, step, None)
        saved = self.wait()
        assert saved is not None, "it was begun just now"
        return saved

    def save(self, state: State | Frozen, step: int, facts: Mapping[str, Any]) -> Saved | None:
        """Copies the state and begins to save it; waits for the save before, and tells how that ended.

        Args:
            state: of the training as it is now.
            step: optimizer steps that are done.
            facts: what the checkpoint is to say of itself.
        """
        before = self.wait()
        self._start(state, step, dict(facts))
        return before

    def _start(self, state: State | Frozen, step: int, facts: dict[str, Any] | None) -> None:
        """Copies the state and begins to save it; without facts it is removed again."""
        begin = time.perf_counter()
        if failure := self._keep(state):
            self._pending = self._thread.submit(Saved, step=step, seconds=0.0, stalled=0.0, failure=failure)
            return
        parts = parts_of(state.tensors())
        self._share_out(parts)
        copies = self._copied([each for each in parts if self._mine is None or each.place in self._mine])
        stalled = time.perf_counter() - begin
        self._pending = self._thread.submit(self._save, copies, step, facts, begin, stalled)

    def wait(self) -> Saved | None:
        """Waits for the save that is under way; how it ended, None where there was none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    def close(self) -> None:
        """Ends the thread, behind what it is at, and gives back the memory of copies."""
        self._thread.shutdown()
        self._give_back()

    def keep_again(self, state: State, replaced: Sequence[str]) -> str:
        """Keeps what no step changes in the place of a copy that was damaged; why that is not possible, empty where it is.

        Args:
            state: of the training, with these weights in place.
            replaced: seals of the copy that checkpoints name.
        """
        return self._keep(state, {REPLACES: list(replaced)})

    def _give_back(self) -> None:
        """Gives pinned memory back to the system: torch would keep it for whatever is pinned next."""
        import torch

        pinned = bool(self._buffers)
        self._buffers.clear()
        if pinned and hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
            gc.collect()  # the planners of earlier saves, which have the copies, are in reference cycles
            torch.accelerator.empty_host_cache()

    def _keep(self, state: State | Frozen, facts: Mapping[str, Any] | None = None) -> str:
        """Sees that what no step changes is kept; why it is not, on every rank alike."""
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
        assert saved is not None, "it was saved just now"
        self._kept = not saved.failure
        return saved.failure

    def _share_out(self, parts: Sequence[Part]) -> None:
        """Decides who writes what, again where any rank has something new."""
        if self._group is None:
            return
        import torch
        import torch.distributed as dist

        places = {each.place for each in parts}
        new = torch.tensor(int(self._mine is None or places != self._known))
        dist.all_reduce(new, op=dist.ReduceOp.MAX, group=self._group)
        if not new:
            return
        sizes = {each.place: each.data.numel() * each.data.element_size() for each in parts}
        everybody: list[dict[Any, int]] = [{}] * dist.get_world_size(self._group)
        dist.all_gather_object(everybody, sizes, group=self._group)
        self._known, self._mine = places, shared_out(everybody)[self._rank]
        self._give_back()

    def _copied(self, parts: Sequence[Part]) -> list[Part]:
        """Copies on the CPU, which training does not change."""
        import torch

        out = []
        for each in parts:
            if each.data.device.type == "cpu":
                out.append(replace(each, data=each.data.clone()))
                continue
            # Pinned memory takes long to get, and is kept for the next save.
            if each.place not in self._buffers:
                self._buffers[each.place] = torch.empty_like(each.data, device="cpu", pin_memory=True)
            buffer = self._buffers[each.place].copy_(each.data, non_blocking=True)
            out.append(replace(each, data=buffer))
        if self._buffers:
            torch.cuda.synchronize()
        return out

    def _save(self, parts: list[Part], step: int, facts: dict[str, Any] | None, begin: float, stalled: float) -> Saved:
        from torch.distributed.checkpoint import CheckpointException

        size = 0
        try:
            failure, size = self._written(parts, step, facts)
        except (CheckpointException, OSError) as error:
            failure = _reason(error, self._group is not None)
        if (failure or facts is None) and self._rank == 0:
            self.folder.discard(step)
        return Saved(step=step, seconds=time.perf_counter() - begin, stalled=stalled, failure=failure, bytes=size)

    def _written(self, parts: list[Part], step: int, facts: dict[str, Any] | None) -> tuple[str, int]:
        """Writes a checkpoint; why there is none, on every rank alike, and how many bytes it has."""
        beside = self.folder.beside(step)
        write(beside, parts, self._group)
        own = [f"__{self._rank}_*.distcp", *([".metadata"] if self._rank == 0 else [])]
        mine = _tried(lambda: described(beside, [each.name for name in own for each in beside.glob(name)]))
        everybody = self.gathered(mine)
        failure = next((each for each in everybody if isinstance(each, str)), "")
        if not failure and self._rank == 0:
            files = {name: about for each in everybody for name, about in each.items()}
            missing = [name for name in files if not (beside / name).exists()]
            if missing:
                failure = f"rank 0 does not see {missing[0]}: all ranks must share the folder {self.folder.path}"
            elif facts is not None:
                made = _tried(lambda: self.folder.finish(step, files, facts))
                failure = made if isinstance(made, str) else ""
        size = sum(about["bytes"] for each in everybody if isinstance(each, dict) for about in each.values())
        return str(self.gathered(failure)[0]), size

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has."""
        if self._group is None:
            return [value]
        import torch.distributed as dist

        out = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(out, value, group=self._group)
        return out


def patient_group() -> "ProcessGroup":
    """A group of all ranks whose collectives wait for one that reads or writes a large checkpoint; all ranks call it. A rank
    that is gone is noticed by its connection, and not by a time."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=PATIENCE)


def shared_out(everybody: Sequence[Mapping[Any, int]]) -> list[set[Any]]:
    """What each rank writes of what they have, so that each part is written once: the largest parts first, each by the
    rank that has the least to write of those that have it.

    Args:
        everybody: of every rank what it has, and how large that is.
    """
    holders: dict[Any, list[int]] = {}
    for rank, sizes in enumerate(everybody):
        for place in sizes:
            holders.setdefault(place, []).append(rank)
    loads = [0] * len(everybody)
    out: list[set[Any]] = [set() for _ in everybody]
    for place, ranks in sorted(holders.items(), key=lambda item: (-everybody[item[1][0]][item[0]], str(item[0]))):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += everybody[rank][place] + 1
        out[rank].add(place)
    return out


def _current_device() -> int | None:
    """The CUDA device of the calling thread; None in a process that does not use CUDA."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _on_device(index: int | None) -> None:
    """Has the calling thread use a CUDA device."""
    import torch

    if index is not None:
        torch.cuda.set_device(index)


def _tried(what: Any) -> Any:
    """What a call returns; the reason as text where the disk refuses."""
    try:
        return what()
    except OSError as error:
        return _reason(error)


def _reason(error: BaseException, several: bool = True) -> str:
    """Why a save failed, in a line: what a rank was told rather than that one of them failed; whose it is where there are
    several."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"rank {rank}: {_reason(cause)}" if several else _reason(cause)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
