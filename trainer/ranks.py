"""Ranks started by a launcher, such as torchrun: rank 0's decisions are sent to the others.

Deciding may take dry runs on the devices of this host. Until rank 0 has decided, the other ranks wait at the
launcher's store and do not touch the devices.

`train_rank` runs a training in such ranks, as `redline train` does. A rank that runs out of memory leaves a note in the folder.
The next start, such as by torchrun's `--max-restarts`, then takes a safer configuration.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ..base.device import usable_cores
from ..base.errors import RedlineError, RunnerError, UsageError
from ..base.reading import JsonLines
from ..base.writing import write_atomic
from ..results.names import LOG, OUT_OF_MEMORY, log_size
from ..runners.trial import failure
from ..runners.trial.memory import CudaMemoryMeter, HostMemoryMeter, MemoryMeter
from ..runners.trial.rank import RankContext
from .checkpoint.saver import patient_group
from .driver import Driver
from .listener import TrainListener
from .program import TrainRank
from .request import TrainRequest

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store


PATIENCE = timedelta(days=7)
"""Limit on waiting for rank 0 to decide. A search may take long, and a launcher ends all ranks if one dies."""
START_S = 1800.0
"""Limit on waiting for a rank that has not started, s; the default of torch's stores."""
_KEY = "redline"
_LOOK_S = 0.05  # s between looks at what the other ranks have written
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Position of this process among the ranks of a launcher."""

    rank: int
    local_rank: int
    """Rank on this host."""
    size: int
    """Number of ranks."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> "RankPlace | None":
        """Reads the launcher's environment variables; None without a launcher."""
        if not all(environment.get(name, "").isdigit() for name in _NAMES):
            return None
        rank, local_rank, size = (int(environment[name]) for name in _NAMES)
        return RankPlace(rank=rank, local_rank=local_rank, size=size)


@dataclass(frozen=True, kw_only=True)
class JoinedRanks:
    """This process after all ranks have joined."""

    place: RankPlace
    device: "torch.device"
    """Device that this rank trains on."""
    group: "ProcessGroup | None"
    """Gloo group of all ranks; None for a single rank."""


def place() -> RankPlace:
    """Returns the rank of this process, which is the only one without a launcher."""
    import torch.distributed as dist

    rank_place = RankPlace.of(os.environ) or RankPlace(rank=0, local_rank=0, size=1)
    if not dist.is_initialized():
        return rank_place
    local_rank = rank_place.local_rank if rank_place.size > 1 else dist.get_rank()
    return RankPlace(rank=dist.get_rank(), local_rank=local_rank, size=dist.get_world_size())


def decide_once(here: RankPlace, decide: Callable[[], Any]) -> tuple[Any, JoinedRanks]:
    """Returns rank 0's decision on every rank, after all ranks have joined.

    Raises:
        RedlineError: on every rank, if deciding raised it on rank 0.
    """
    import torch.distributed as dist

    if here.size == 1 and not dist.is_initialized():
        return decide(), JoinedRanks(place=here, device=_device(here), group=None)
    if dist.is_initialized():  # by the user's loop
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        box = [_serialized(decide) if here.rank == 0 else b""]
        dist.broadcast_object_list(box, src=0, group=group)
        return _read(box[0]), JoinedRanks(place=here, device=_device(here), group=group)
    decision = _at_the_store(here, decide)
    return decision, JoinedRanks(place=here, device=_device(here), group=patient_group())


def _at_the_store(here: RankPlace, decide: Callable[[], Any]) -> Any:
    import torch.distributed as dist

    launcher_store, rank, size = next(dist.rendezvous("env://", here.rank, here.size))
    store = own_part(launcher_store, rank, size)
    if rank == 0:
        store.set(_KEY, _serialized(decide))
    else:
        store.wait([_KEY], PATIENCE)
    decision = _read(store.get(_KEY))
    dist.init_process_group(
        "nccl" if _device(here).type == "cuda" else "gloo",
        store=dist.PrefixStore("redline", store),
        rank=rank,
        world_size=size,
    )
    return decision


def own_part(store: "Store", rank: int, size: int) -> "Store":
    """Returns a part of the launcher's store that is used only by this start of the ranks.

    torchrun's store outlives the ranks that it restarts, with everything they wrote, and the number of restarts is not
    the same on every host (https://github.com/pytorch/pytorch/issues/135712). Therefore each process writes its own
    name. Rank 0 publishes the names that it sees, until all of these processes have confirmed the same list.

    Raises:
        RunnerError: a rank does not start.
    """
    from torch.distributed import PrefixStore

    identifier, until = uuid.uuid4().hex, time.monotonic() + START_S
    store.set(f"{_KEY}/here/{rank}", identifier)
    agreed, members = "", [""] * size
    while time.monotonic() < until:
        if rank == 0:
            members = [_get(store, f"here/{member_rank}") for member_rank in range(size)]
            if ",".join(members) != agreed:
                agreed = ",".join(members)
                store.set(f"{_KEY}/members", agreed)
            if all(_get(store, f"answer/{member}") == agreed for member in members[1:] if member) and all(members):
                store.set(f"{_KEY}/all/{identifier}", agreed)
                return PrefixStore(f"{_KEY}/{identifier}", store)
        else:
            agreed = _get(store, "members")
            members = agreed.split(",")
            if members[rank : rank + 1] == [identifier]:
                store.set(f"{_KEY}/answer/{identifier}", agreed)
                if _get(store, f"all/{members[0]}") == agreed:
                    return PrefixStore(f"{_KEY}/{members[0]}", store)
        time.sleep(_LOOK_S)
    missing = [str(member_rank) for member_rank, name in enumerate(members) if not name]
    raise RunnerError(
        f"rank {rank} has waited for the others for {START_S:.0f} s; missing: {', '.join(missing) or 'unknown'}"
    )


def _get(store: "Store", key: str) -> str:
    """Returns the value of a key; empty if it is not set."""
    return str(store.get(f"{_KEY}/{key}").decode()) if store.check([f"{_KEY}/{key}"]) else ""


def _serialized(decide: Callable[[], Any]) -> bytes:
    """Serializes the decision, or the error that deciding raised."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(decide()))
    except RedlineError as error:
        return bytes(cloudpickle.dumps(error))


def _read(serialized: bytes) -> Any:
    import cloudpickle

    decision = cloudpickle.loads(serialized)
    if isinstance(decision, RedlineError):
        raise decision
    if decision is None:
        raise RunnerError("rank 0 decided on nothing")
    return decision


def _device(here: RankPlace) -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # The program may have chosen a device. A process may see one GPU only, whatever its local rank, and without a launcher
    # that says otherwise the local rank is the global one.
    current_index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    index = current_index or here.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def train_rank(request: TrainRequest, place: RankPlace, listener: TrainListener) -> bool:
    """Runs the training on this rank. Returns True if it was ended before its last step.

    Raises:
        RedlineError: on every rank, if rank 0 refuses the request.
        TrainingFailed: on rank 0, if the last step could not be saved.
    """
    import torch
    import torch.distributed as dist

    with contextlib.ExitStack() as stack:
        driver: Driver | None = None

        def decide() -> list[TrainRank]:
            """Returns the work of all ranks; none if the training has reached its end before."""
            nonlocal driver
            driver = Driver(replace(request, devices=place.size), listener, stack, again=True)
            if driver.reports_done():
                return []
            driver.prepare()
            driver.listener.on_start(driver.training_start())
            return [driver.program()]

        if request.devices not in (None, place.size):
            raise UsageError(
                f"devices={request.devices} contradicts the launcher's number of ranks, {place.size}; leave --devices out"
            )
        work, joined = decide_once(place, decide)
        if dist.is_initialized():
            stack.callback(dist.destroy_process_group)
        if not work:
            return False
        (program,) = work
        meter: MemoryMeter = HostMemoryMeter()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", place.size))
        if joined.device.type == "cuda":
            # torchrun sets OMP_NUM_THREADS=1, too few for the update of offloaded states.
            torch.set_num_threads(max(1, usable_cores() // local_ranks))
            stack.callback(torch.cuda.synchronize)
            meter = CudaMemoryMeter([joined.device])
        context = RankContext(
            rank=place.rank,
            local_rank=place.local_rank if joined.device.index is None else joined.device.index,
            world_size=place.size,
            device_type=joined.device.type,
            init_method="env://",
            memory_limit_mib=request.limit_mib,
            memory=meter,
            local_world_size=local_ranks,
        )
        if request.limit_mib is not None:
            meter.limit(request.limit_mib)
        if driver is not None:
            reader = JsonLines(program.folder, LOG, log_size(program.folder))
            program = replace(program, on_line=partial(_follow, reader, driver.listener))
        try:
            end = program(context)
        except Exception as error:
            if failure.is_oom(error):
                note = {"rank": place.rank, "configuration": dict(program.config), "reason": failure.one_line(error)}
                with contextlib.suppress(OSError):  # the original error is more important
                    write_atomic(program.folder / OUT_OF_MEMORY, json.dumps(note).encode())
            raise
        if driver is not None:
            driver.check_saved(end)
        return end.stopped


def _follow(reader: JsonLines, listener: TrainListener) -> None:
    for line in reader.lines():
        listener.on_line(line)
