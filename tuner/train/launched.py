"""A training whose ranks a launcher has started: torchrun, or whatever sets the variables that it sets.

Rank 0 decides as `redline train` does by itself, and tells the others. A rank that runs out of memory leaves a note of it in
the folder, by which the next start, as of torchrun's `--max-restarts`, takes a safer configuration.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import RedlineError, RunnerError
from ...results.trained import LogReader, log_size
from ...runners import failure
from ...runners.memory import CudaMemoryMeter, HostMemoryMeter, MemoryMeter
from ...runners.rank import RankContext
from ...runners.train import TrainRank
from .driver import Driver
from .listener import TrainListener
from .request import TrainRequest

if TYPE_CHECKING:
    pass

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
OUT_OF_MEMORY = "out-of-memory.json"
"""The note, in a training's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that a launcher has started."""

    rank: int
    """Among all."""
    local_rank: int
    """On this host."""
    size: int
    """Ranks."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Place | None":
        """What the launcher says; None where there is none."""
        if not all(environment.get(name, "").isdigit() for name in _NAMES):
            return None
        rank, local_rank, size = (int(environment[name]) for name in _NAMES)
        return Place(rank=rank, local_rank=local_rank, size=size)


def train_rank(request: TrainRequest, place: Place, listener: TrainListener) -> bool:
    """What this rank does; whether the training was ended before its last step.

    Raises:
        RedlineError: on every rank, where rank 0 refuses what is asked.
    """
    import torch
    import torch.distributed as dist

    device, meter = _device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method="env://")
    try:
        with contextlib.ExitStack() as held:
            decided, listener = _decided(request, listener, place, held) if place.rank == 0 else (None, listener)
            program = _told(decided)
            context = RankContext(
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=place.size,
                device_type=device,
                init_method="env://",
                memory_limit_mib=request.limit_mib,
                memory=meter,
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", place.size)),
            )
            if request.limit_mib is not None:
                meter.limit(request.limit_mib)
            reader = LogReader(program.folder, log_size(program.folder))
            following = replace(program, heard=lambda: _follow(reader, listener)) if place.rank == 0 else program
            try:
                ended = following(context)
            except (RuntimeError, MemoryError) as error:
                if failure.is_oom(error):
                    note = {
                        "rank": place.rank,
                        "configuration": dict(program.config),
                        "reason": failure.one_line(error),
                    }
                    (program.folder / OUT_OF_MEMORY).write_text(json.dumps(note))
                raise
            return ended.stopped
    finally:
        dist.destroy_process_group()
        if device == "cuda":
            torch.cuda.synchronize()


def _device(place: Place) -> tuple[str, MemoryMeter]:
    import torch

    if not torch.cuda.is_available():
        return "cpu", HostMemoryMeter()
    torch.cuda.set_device(place.local_rank)
    return "cuda", CudaMemoryMeter([torch.device("cuda", place.local_rank)])


def _decided(
    request: TrainRequest, listener: TrainListener, place: Place, held: contextlib.ExitStack
) -> "tuple[TrainRank | RedlineError, TrainListener]":
    """What all ranks are to do, or why they cannot; and who hears of it: `listener`, and trackers with it."""
    try:
        driver = Driver(replace(request, devices=place.size), listener, held, again=True)
        driver.prepare()
        note = driver.path / OUT_OF_MEMORY
        if note.exists():
            reason = json.loads(note.read_text()).get("reason", "")
            driver.safer(f"out of memory: {reason}")
            note.unlink()
        driver.listener.began(driver.begun())
        return driver.program(), driver.listener
    except RedlineError as error:
        return error, listener


def _told(decided: "TrainRank | RedlineError | None") -> TrainRank:
    """What rank 0 has decided, on every rank.

    Raises:
        RedlineError: what it refused.
    """
    import cloudpickle
    import torch.distributed as dist

    box: list[Any] = [None if decided is None else cloudpickle.dumps(decided)]
    dist.broadcast_object_list(box, src=0)
    found = cloudpickle.loads(box[0])
    if isinstance(found, TrainRank):
        return found
    if isinstance(found, RedlineError):
        raise found
    raise RunnerError(f"rank 0 said something else than what to do: {type(found).__name__}")


def _follow(reader: LogReader, listener: TrainListener) -> None:
    for line in reader.lines():
        listener.line(line)
