"""Checkpoints in a folder: which are kept, a description of each, and saving in the background, to storage that all ranks share.

torch.distributed.checkpoint writes a checkpoint to a temporary folder, which is renamed when it is complete, so that
earlier ones stay intact if a process dies.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.device import one_thread
from ...base.errors import StudyError
from ...base.writing import sync_folder, write_atomic
from ...models.layouts.dcp import save_planner
from .state import Located, State

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.staging import DefaultStager


MANIFEST = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(saving|removing)")
"""Names of the leftovers of a killed save or removal."""
_METADATA = ".metadata"
"""Metadata file of torch.distributed.checkpoint, which every checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training."""

    path: Path

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(_NAME.fullmatch(self.path.name)[1])  # type: ignore[index]  # found by that name

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Description that was saved with it: samples used, configuration, devices. `redline train` adds `from_weights`: true
        if frozen parameters are left out.

        Raises:
            StudyError: it cannot be read, or was written by another version.
        """
        try:
            document = json.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StudyError(
                f"'{self.path}' is not a whole checkpoint: its {MANIFEST} cannot be read ({error}); remove the folder to "
                "continue from an earlier checkpoint"
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StudyError(
                f"'{self.path}' is not a checkpoint of this version of redline, which reads format {FORMAT}: "
                f"its {MANIFEST} has another format"
            )
        return document


class CheckpointFolder:
    """The checkpoints in a folder, which need not exist yet.

    Args:
        keep: number of checkpoints to keep.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path, self.keep = path, keep

    def all(self) -> list[Checkpoint]:
        """The checkpoints, the latest first. A folder with the name but not the contents of a checkpoint is ignored."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            checkpoints = [Checkpoint(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
            return sorted(filter(_is_checkpoint, checkpoints), key=lambda checkpoint: -checkpoint.step)
        return []

    @property
    def step(self) -> int:
        """Number of steps of the latest checkpoint; 0 if there is none."""
        return next((checkpoint.step for checkpoint in self.all()), 0)

    def obstacle(self) -> str | None:
        """Reason why no checkpoints may be saved here: other files. None if the folder is absent, empty, or contains
        checkpoints.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(path.name for path in self.path.iterdir() if not _LEFTOVER.fullmatch(path.name))
            if names and not self.all():
                further = f" and {len(names) - 3} more" if len(names) > 3 else ""
                return (
                    f"'{self.path}' contains {', '.join(names[:3])}{further} and no checkpoint: checkpoints need a separate "
                    "folder; give one that is new or empty"
                )
        return None

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of a step, which need not exist yet."""
        return Checkpoint(self.path / f"step-{step:08d}")

    def temporary(self, step: int) -> Path:
        """Temporary folder that the checkpoint of a step is written to."""
        return self.path / f".step-{step:08d}.saving"

    def finish(self, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Turns the temporary folder into a checkpoint, and removes surplus checkpoints.

        Args:
            facts: description for the manifest, JSON-ready.

        Raises:
            OSError: it cannot be written.
        """
        temporary, checkpoint = self.temporary(step), self.checkpoint(step)
        write_atomic(temporary / MANIFEST, json.dumps({"format": FORMAT, "step": step, **facts}, indent=1).encode())
        sync_folder(temporary)
        if checkpoint.path.exists():  # of a training that went back to an earlier step
            self._remove(checkpoint)
        os.rename(temporary, checkpoint.path)
        sync_folder(self.path)
        earlier = [checkpoint for checkpoint in self.all() if checkpoint.step < step]
        for surplus in earlier[self.keep - 1 :]:
            self._remove(surplus)
        return checkpoint

    def discard(self, step: int) -> None:
        """Removes the temporary folder of a failed save."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def prepare(self) -> None:
        """Creates the folder, and removes only leftovers of killed saves.

        Raises:
            OSError: it cannot be created.
            StudyError: it contains something else.
        """
        if obstacle := self.obstacle():
            raise StudyError(obstacle)
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, checkpoint: Checkpoint) -> None:
        # Renamed first, so that a killed process does not leave half a checkpoint under its name.
        removing = checkpoint.path.with_name(f".{checkpoint.path.name}.removing")
        with contextlib.suppress(OSError):
            os.rename(checkpoint.path, removing)
        shutil.rmtree(removing, ignore_errors=True)


def _is_checkpoint(checkpoint: Checkpoint) -> bool:
    """True if a folder was saved as a checkpoint."""
    path = checkpoint.path
    named_so = path.name == f"step-{checkpoint.step:08d}" and not path.is_symlink()
    return named_so and (path / MANIFEST).is_file() and (path / _METADATA).is_file()


PATIENCE = timedelta(days=1)
"""Timeout of collectives during a checkpoint; gloo's default of half an hour is short for terabytes."""
Part = tuple[str, tuple[int, ...]]
"""A part of a tensor that one rank has: the tensor's name and the part's offset in it."""


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
        self._assigned: set[Part] = set()
        """Parts that this rank writes, if there are several."""
        self._parts: set[Part] = set()
        """All parts of this rank when they were last assigned."""
        self._stager: DefaultStager | None = None
        self._thread = one_thread("checkpoint")
        self._running: Future[Saved] | None = None

    def save(self, state: State, step: int, facts: Mapping[str, Any]) -> Saved | None:
        """Copies the state and starts saving it. Waits for the previous save, and returns its result.

        Args:
            facts: description for the manifest.
        """
        previous, begin = self.wait(), time.perf_counter()
        tensors = state.tensors()
        pieces = self._own(parts_of(tensors))
        if self._stager is None:
            self._stager = _stager(any(piece.is_cuda for piece in pieces.values()))
        copies = self._stager.stage(pieces)
        planner = save_planner({name: tuple(region.shape) for name, (_, region) in tensors.items()})
        stalled = time.perf_counter() - begin
        self._running = self._thread.submit(self._save, copies, planner, step, dict(facts), begin, stalled)
        return previous

    def _save(self, copies: Any, planner: Any, step: int, facts: dict[str, Any], begin: float, stalled: float) -> Saved:
        from torch.distributed.checkpoint import CheckpointException, save

        failure = ""
        try:
            writer = _writer(self.folder, step, facts)
            save(copies, storage_writer=writer, planner=planner, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, OSError) as error:
            failure = _reason(error, self._group is not None)
        if failure and self._rank == 0:
            self.folder.discard(step)
        seconds = time.perf_counter() - begin
        return Saved(step=step, seconds=seconds, stalled=stalled, failure=failure)

    def wait(self) -> Saved | None:
        """Waits for the running save and returns its result; None if there is none."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        return running.result()

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        """Ends the thread after its current save, and frees the memory of copies."""
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _own(self, pieces: "dict[Part, torch.Tensor]") -> "dict[Part, torch.Tensor]":
        """Parts that this rank writes. torch would choose as well, but after every rank has copied all of its parts."""
        if self._group is None:
            return pieces
        import torch
        import torch.distributed as dist

        changed = torch.tensor(int(pieces.keys() != self._parts))
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed:
            sizes = gathered({key: piece.nbytes for key, piece in pieces.items()}, self._group)
            self._parts, self._assigned = set(pieces), shared_out(sizes)[self._rank]
        return {key: piece for key, piece in pieces.items() if key in self._assigned}


def parts_of(tensors: Located) -> "dict[Part, torch.Tensor]":
    """Parts of tensors on this rank."""
    return {
        (name, tuple(box.offset)): piece.detach()
        for name, (tensor, region) in tensors.items()
        for box, piece in region.parts(tensor)
    }


def shared_out(sizes_by_rank: Sequence[Mapping[Part, int]]) -> list[set[Part]]:
    """Assigns each part to one of the ranks that have it: the largest parts first, each to the rank with the least
    assigned bytes.

    Args:
        sizes_by_rank: bytes of each part of every rank.
    """
    holders: dict[Part, list[int]] = {}
    for rank, sizes in enumerate(sizes_by_rank):
        for piece in sizes:
            holders.setdefault(piece, []).append(rank)
    loads = [0] * len(sizes_by_rank)
    assigned: list[set[Part]] = [set() for _ in sizes_by_rank]
    for piece, ranks in sorted(holders.items(), key=lambda item: (-sizes_by_rank[item[1][0]][item[0]], str(item[0]))):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += sizes_by_rank[rank][piece] + 1  # spreads empty pieces too
        assigned[rank].add(piece)
    return assigned


def _stager(on_cuda: bool) -> "DefaultStager":
    """Returns a stager, which copies tensors to host memory before they change. The memory is pinned if they are on GPUs, and
    reused by the next save, since allocating it is slow.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
        )
    )


def _writer(folder: CheckpointFolder, step: int, facts: Mapping[str, Any]) -> Any:
    """Returns a writer that turns its folder into the checkpoint of a step when all ranks have written."""
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            try:
                return super().write_data(*args)
            except RuntimeError as error:
                # A disk that fails in the middle of a tensor, for which torch reports an unexpected position.
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__context__
                if cause is None:
                    raise
                raise OSError(cause.errno, cause.strerror) from error

        def finish(self, metadata: Any, results: Any) -> None:
            """Called on rank 0 alone."""
            super().finish(metadata, results)
            names = {info.relative_path for info in metadata.storage_data.values()}
            for name in sorted(names):
                if not (folder.temporary(step) / name).exists():
                    raise OSError(f"rank 0 does not see {name}: all ranks must share the folder {folder.path}")
            folder.finish(step, facts)

    # Parts are on the CPU. To copy ahead, torch would open a context on GPU 0 from every rank.
    return Writer(folder.temporary(step), per_thread_copy_ahead=0)


def latest(folder: CheckpointFolder, group: "ProcessGroup | None") -> Checkpoint | None:
    """Returns the latest checkpoint; None if there is none. All ranks call it.

    Args:
        group: gloo group of all ranks; None for one rank.
    """
    # The one that rank 0 sees: another host may see a new one later.
    checkpoint: Checkpoint | None = gathered(next(iter(folder.all()), None), group)[0]
    return checkpoint


def gathered(value: Any, group: "ProcessGroup | None") -> list[Any]:
    """Gathers a value of each rank of a group; None for one rank."""
    if group is None:
        return [value]
    import torch.distributed as dist

    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def patient_group() -> "ProcessGroup":
    """Returns a group of all ranks whose collectives wait while another rank reads or writes a large checkpoint. All
    ranks call it. A dead rank is detected by its connection rather than by a timeout.
    """
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _reason(error: BaseException, several: bool = True) -> str:
    """Reason of a failed save, in a line: the error of the failing rank rather than the report that a rank failed,
    with the rank's number if there are several.
    """
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"rank {rank}: {_reason(cause)}" if several else _reason(cause)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
