"""Ranks started by a launcher, such as torchrun: rank 0's decisions are sent to the others.

Until rank 0 has decided, no rank has a context on a device.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, RunnerError
from .checkpoint.saver import patient_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store


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


def place() -> RankPlace:
    """Returns the rank of this process, which is the only one without a launcher."""
    import torch.distributed as dist

    rank_place = RankPlace.of(os.environ) or RankPlace(rank=0, local_rank=0, size=1)
    if not dist.is_initialized():
        return rank_place
    local_rank = rank_place.local_rank if rank_place.size > 1 else dist.get_rank()
    return RankPlace(rank=dist.get_rank(), local_rank=local_rank, size=dist.get_world_size())


def decide_once(here: RankPlace, decide: Callable[[], Any]) -> "tuple[Any, torch.device, ProcessGroup | None]":
    """Returns rank 0's decision on every rank, the device that this rank trains on, and the gloo group of all ranks, which
    is None for a single rank.

    Raises:
        RedlineError: on every rank, if deciding raised it on rank 0.
    """
    import torch
    import torch.distributed as dist

    if here.size == 1 and not dist.is_initialized():
        return decide(), _device(here), None
    if not dist.is_initialized():  # by the user's loop
        store, rank, size = next(dist.rendezvous("env://", here.rank, here.size))
        store = dist.PrefixStore("redline", own_part(store, rank, size))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    group = patient_group()
    decided: list[Any] = [None]
    if here.rank == 0:
        try:
            decided = [decide()]
        except RedlineError as error:
            decided = [error]
    dist.broadcast_object_list(decided, src=0, group=group)
    if isinstance(decided[0], RedlineError):
        raise decided[0]
    # Not before, since rank 0 looks up the memory of devices, of which a context takes some.
    return decided[0], _device(here), group


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
